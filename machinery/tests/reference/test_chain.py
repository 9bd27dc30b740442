"""Examples of docs/reference.md: on a whole chain, with Spark."""

from __future__ import annotations

import uuid
from contextlib import closing
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Consumer

from outbox import Settings
from outbox_lab.testing import (
    Application,
    ServiceClient,
    SinkRole,
    check_transform,
    example_events,
    query,
    run,
    wait_for,
)
from outbox_lab.testing.fixtures.spark import leaves_sockets
from outbox_lab.walkthrough import Checkpoint, connector_status, consumer_config, headers_of, terminate_replication

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = leaves_sockets
STOCK = "SELECT stock FROM stock WHERE sink = 'dedup'"


@pytest.fixture
def item(app: Application, databases: Settings) -> str:
    """An item with a stock of 3."""
    body = {"item_id": str(uuid.uuid4()), "quantity": 3, "unit": "KGM"}
    assert ServiceClient(app, databases).post("/movements", body, Idempotency_Key="a").status_code == 201
    return str(body["item_id"])


def test_from_the_request_to_the_stock(chain: Settings, item: str, spark: SparkSession) -> None:
    from outbox.spark import events, session

    assert terminate_replication(chain) > 0  # Debezium connects again
    run(chain, "check", "--wait", "60")  # until the topic has every event
    run(chain, "sink", "--until-caught-up")
    assert query(chain, STOCK, SinkRole.OWNER) == [(3,)]

    received = events(session(chain).newSession(), chain, ["item.received"])
    assert [row.item_id for row in received.collect()] == [item]

    assert connector_status(chain).mode.startswith("exactly-once")
    assert Checkpoint(chain, "dedup", generation=0).committed() == 0
    with closing(Consumer({**consumer_config(chain, "read_committed"), "auto.offset.reset": "earliest"})) as consumer:
        consumer.subscribe([f"{chain.topic_prefix}.item"])

        def sent() -> bool:
            message = consumer.poll(1)
            return message is not None and dict(headers_of(message))["eventType"] == b"received"

        wait_for("the event", sent, timeout_s=60)


def test_a_transform(spark: SparkSession, databases: Settings) -> None:
    def in_grams(events: DataFrame) -> DataFrame:
        return events.selectExpr("event_id", "partition", "offset", "item_id", "quantity * 1000 AS grams")

    rows = check_transform(in_grams, example_events(spark, databases, ["item.received"]))
    assert {row["grams"] for row in rows} == {3000}
