"""The ledger's sink `changes` and its connector, from the service to the balances."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from outbox import Settings
from outbox_lab.testing import SinkRole, query, run, wait_for

from tests.ledger import Client

SINK = "changes"


@pytest.fixture
def captured(chain: Settings) -> Iterator[Settings]:
    """A chain beside which a test may start the connector of the captured table; it is removed in the end."""
    yield chain
    run(chain, "connect", "remove", SINK, "--drop-slot", "--yes")


def balances(settings: Settings) -> dict[str, int]:
    """Balances of the sink once it has read its topic."""
    run(settings, "sink", SINK, "--until-caught-up")
    rows = query(settings, f"SELECT key, total FROM sink_totals WHERE sink = '{SINK}'", SinkRole.AUDITOR)
    return {str(key): int(total) for key, total in rows}


def test_each_account_has_the_balance_of_its_newest_change(captured: Settings, client: Client) -> None:
    one, other = client.open(), client.open()
    bank = client.fund(one, 500)  # it comes by the snapshot
    run(captured, "connect", "apply", SINK)
    for amount in (3, 20, 100):
        assert client.transfer(one, other, amount).status_code == 201
    due = {bank: -500, one: 500 - 123, other: 123}
    wait_for("the balances of the newest changes", lambda: balances(captured) == due, timeout_s=120)
