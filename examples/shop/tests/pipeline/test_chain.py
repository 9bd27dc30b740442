"""From the request to the projections, through real Postgres, Debezium, Kafka and Spark: every event counts once."""

from __future__ import annotations

from outbox import Settings
from outbox_lab.testing import SinkRole, query, run

from tests.conftest import Client


def test_every_event_counts_once_though_all_are_delivered_twice(chain: Settings, client: Client) -> None:
    client.add("TEA-1", 100)
    orders = [client.place().get_json()["id"] for _ in range(30)]
    for order in orders[10:]:
        assert client.cancel(order).status_code == 200
    run(chain, "check", "--wait", "60")
    run(chain, "sink", "--until-caught-up")
    for sink in ("orders", "sales", "stock"):
        run(chain, "rewind", sink, "--to-earliest", "--yes")
    run(chain, "sink", "--until-caught-up")
    states = "SELECT status, count(*), sum(cents) FROM order_states GROUP BY status ORDER BY status"
    assert query(chain, states, SinkRole.OWNER) == [("cancelled", 20, 0), ("placed", 10, 9000)]
    assert query(chain, "SELECT product, pieces FROM stock_levels", SinkRole.OWNER) == [("TEA-1", 80)]
    assert query(chain, "SELECT sum(ordered), sum(cancelled) FROM sales_by_day", SinkRole.OWNER) == [(60, 40)]

    # What is wrong in a sink is found, and repaired from the source.
    query(chain, "UPDATE order_states SET status = 'placed'", SinkRole.OWNER)
    assert 'status: "cancelled" in the source, "placed" in the sink' in run(chain, "check", status=1)
    run(chain, "rebuild", "orders", "--from", "source", "--yes")
    run(chain, "check")
