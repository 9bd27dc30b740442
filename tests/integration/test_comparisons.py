"""The comparisons of the sinks: both sides have the same totals and rows, and a table that is wrong differs."""

from __future__ import annotations

import pytest
from outbox import Settings
from outbox_lab.testing import SinkRole, deliver, differing_keys, outbox_records, query

from tests.ledger import Client

COMPARISONS = {
    "accounts": ["accounts", "transfers", "turnover"],
    "balances": ["balances"],
    "balances-merge": ["balances"],
    "balances-offsets": ["balances"],
    "balances-upsert": ["balances"],
    "balances-versions": ["balances"],
}


def use(client: Client) -> None:
    """Open some accounts, move money, freeze one and close one."""
    bank, account, other = client.open("system"), client.open(), client.open()
    for source, target, amount in ((bank, account, 100), (account, other, 30), (account, bank, 70)):
        assert client.transfer(source, target, amount).status_code == 201
    assert client.freeze(other).status_code == 200
    assert client.close(account).status_code == 200


@pytest.mark.parametrize("sink", COMPARISONS)
def test_both_sides_are_equal(client: Client, databases: Settings, sink: str) -> None:
    use(client)
    deliver(databases, outbox_records(databases), sink)
    assert differing_keys(databases, sink) == {name: set() for name in COMPARISONS[sink]}


@pytest.mark.parametrize(
    ("sink", "name", "change"),
    [
        ("balances", "balances", "balances SET balance_minor = balance_minor + 1"),
        ("accounts", "transfers", "accounts SET transfers = transfers + 1"),
        ("accounts", "turnover", "accounts SET turnover_minor = turnover_minor - 1"),
        ("accounts", "accounts", "accounts SET status = CASE status WHEN 'open' THEN 'frozen' ELSE 'open' END"),
        ("accounts", "accounts", "accounts SET label = NULL"),
        ("accounts", "accounts", "accounts SET version = 0"),
    ],
)
def test_a_wrong_table_differs(client: Client, databases: Settings, sink: str, name: str, change: str) -> None:
    use(client)
    deliver(databases, outbox_records(databases), sink)
    query(databases, f"UPDATE {change}", SinkRole.OWNER)
    found = {one: len(keys) for one, keys in differing_keys(databases, sink).items()}
    assert found == {one: 3 if one == name else 0 for one in COMPARISONS[sink]}
