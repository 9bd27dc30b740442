"""The ledger's sink `lakehouse`, from the service to the table."""

from __future__ import annotations

from pathlib import Path

from deltalake import DeltaTable
from outbox import Settings
from outbox_lab.testing import query, run

from tests.ledger import Client

SINK = "lakehouse"


def test_each_transfer_is_in_the_table_once(chain: Settings, client: Client) -> None:
    one, other = client.open(), client.open()
    client.fund(one, 500)
    for amount in (3, 20, 100):
        assert client.transfer(one, other, amount).status_code == 201
    run(chain, "check", "--wait", "60")
    run(chain, "sink", SINK, "--until-caught-up")

    of_transfers = [event_id for (event_id,) in query(chain, "SELECT id FROM outbox WHERE aggregatetype = 'balance'")]
    table = DeltaTable(Path(chain.lakehouse.removeprefix("file://"), SINK)).to_pyarrow_table()
    assert sorted(table["event_id"].to_pylist()) == sorted(of_transfers)
    assert len(of_transfers) == 2 * 4
    run(chain, "check")
