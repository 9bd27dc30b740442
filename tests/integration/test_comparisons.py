"""The comparisons of the sinks: both sides have the same totals, and a table that is wrong differs."""

from __future__ import annotations

from contextlib import closing

import pytest
from outbox.audit import comparison_files
from outbox.audit.comparison_files import Comparison
from outbox.audit.totals import read_totals
from outbox.base.database import connect
from outbox.base.settings import Settings, SinkRole, SourceRole, load
from outbox.sink import spec
from outbox.testing.queries import query
from outbox.testing.records import deliver, outbox_records

from tests.ledger import Client

SINKS = spec.sinks(load(environment=False))
COMPARISONS = {
    f"{sink}, {one.name}": (sink, one)
    for sink in ("balances", "balances-upsert", "accounts")
    for one in comparison_files.load(SINKS[sink])
}


def use(client: Client) -> None:
    """Open some accounts, move money, freeze one and close one."""
    bank, account, other = client.open("system"), client.open(), client.open()
    for source, target, amount in ((bank, account, 100), (account, other, 30), (account, bank, 70)):
        assert client.transfer(source, target, amount).status_code == 201
    assert client.freeze(other).status_code == 200
    assert client.close(account).status_code == 200


def compared(settings: Settings, sink: str, one: Comparison) -> set[str]:
    """The keys whose totals differ."""
    with closing(connect(settings, SourceRole.AUDITOR)) as source, closing(connect(settings, SinkRole.AUDITOR)) as of:
        [due] = read_totals(source, one, one.source).values()
        found = read_totals(of, one, str(one.sink), by_sink=True)[sink]
    return {key for key in {*due.totals, *found.totals} if due.totals.get(key, 0) != found.totals.get(key, 0)}


@pytest.mark.parametrize("name", COMPARISONS)
def test_both_sides_are_equal(client: Client, databases: Settings, name: str) -> None:
    sink, one = COMPARISONS[name]
    use(client)
    deliver(databases, outbox_records(databases), sink)
    assert compared(databases, sink, one) == set()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("balances, balances", "balances SET balance_minor = balance_minor + 1"),
        ("accounts, transfers", "accounts SET transfers = transfers + 1"),
        ("accounts, turnover", "accounts SET turnover_minor = turnover_minor - 1"),
        ("accounts, status", "accounts SET status = CASE status WHEN 'open' THEN 'frozen' ELSE 'open' END"),
    ],
)
def test_a_wrong_table_differs(client: Client, databases: Settings, name: str, change: str) -> None:
    sink, one = COMPARISONS[name]
    use(client)
    deliver(databases, outbox_records(databases), sink)
    query(databases, f"UPDATE {change}", SinkRole.OWNER)
    assert len(compared(databases, sink, one)) == 3


def test_the_comparisons_of_each_sink() -> None:
    names = {name: [one.name for one in comparison_files.load(sink)] for name, sink in SINKS.items()}
    assert names.pop("accounts") == ["status", "transfers", "turnover"]
    names.pop("turnover", None)  # optional; tests/pipeline/test_turnover.py tries its comparison
    assert set(map(tuple, names.values())) == {("balances",)}
