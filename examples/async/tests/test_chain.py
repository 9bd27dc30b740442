"""From the request to the projection, through real Postgres, Debezium, Kafka and Spark: every event counts once."""

from __future__ import annotations

from outbox import Settings
from outbox_lab.testing import SinkRole, query, run

from tests.conftest import Client


def test_every_event_counts_once_though_all_are_delivered_twice(chain: Settings, client: Client) -> None:
    for way in ("enter", "leave") * 10:
        assert client.pass_by(way).status_code == 200
    client.pass_by("enter", garage="south")
    run(chain, "check", "--wait", "60")
    run(chain, "sink", "--until-caught-up")
    run(chain, "rewind", "garages", "--to-earliest", "--yes")
    run(chain, "sink", "--until-caught-up")
    run(chain, "check")
    found = query(chain, "SELECT garage, cars, version FROM garage_cars ORDER BY garage", SinkRole.OWNER)
    assert found == [("north", 0, 20), ("south", 1, 1)]
