"""From the request to the projection, through real Postgres, Debezium, Kafka and Spark: every arrival counts once."""

from __future__ import annotations

import uuid

from outbox import Settings
from outbox_lab.testing import run

from tests.conftest import Client


def test_every_arrival_counts_once_though_all_are_delivered_twice(chain: Settings, client: Client) -> None:
    depots = [str(uuid.uuid4()) for _ in range(3)]
    for number in range(30):
        assert client.arrive(depots[number % 3], number + 1).status_code == 201
    run(chain, "check", "--wait", "60")
    run(chain, "sink", "--until-caught-up")
    run(chain, "rewind", "depots", "--to-earliest", "--yes")
    run(chain, "sink", "--until-caught-up")
    run(chain, "check")
    assert "nothing" in run(chain, "rebuild", "depots", "--from", "source", "--dry-run")
