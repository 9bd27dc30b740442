"""A DataFrame of the events between two moments: what a sink would see, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

import outbox.spark
from outbox.base.settings import Settings
from outbox.base.wait import wait_for
from outbox.kafka import topics
from outbox.kafka.clients import client_config
from outbox_lab.testing.failures import raises
from outbox_lab.testing.fixtures.spark import leaves_sockets
from tests.orders import cancelled, placed
from tests.support.made_events import Event, nth_key
from tests.support.sink_process import Publisher
from tests.support.topic_reader import topic_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = leaves_sockets


def ids(spark: SparkSession, settings: Settings, names: Sequence[str] = ("item",), **moments: datetime) -> list[str]:
    """The ids of the events, sorted."""
    found = outbox.spark.events(spark, settings, names, **moments).select("event_id").collect()
    return sorted(row.event_id for row in found)


def sent(events: Sequence[Event]) -> list[str]:
    return sorted(event.event_id for event in events)


def later() -> datetime:
    """A moment after what was sent and before what will be: Kafka counts in milliseconds."""
    now = datetime.now(UTC)
    wait_for("the clock to go on", lambda: datetime.now(UTC) > now + timedelta(milliseconds=5), timeout_s=5)
    return now + timedelta(milliseconds=2)


def test_it_has_each_committed_event_with_typed_columns(
    spark: SparkSession, topic: Settings, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox.spark, "TASK_MAX_RECORDS", 7)
    events = publisher.events(60)
    publisher.send(events[:40])
    publisher.send(publisher.events(10), abort=True)
    publisher.send_raw(nth_key(1), b"no JSON", None)
    publisher.send(events[40:])
    publisher.send(events[:1])
    found = outbox.spark.events(spark, topic, ["item"])
    publisher.send(publisher.events(10))  # later events are not in it
    types = dict(found.dtypes)
    assert (types["event_id"], types["version"], types["occurred_at"]) == ("string", "bigint", "timestamp")
    assert found.rdd.getNumPartitions() > 5, "many tasks read it"
    rows = found.collect()
    assert sorted(row.event_id for row in rows) == sorted([*sent(events), events[0].event_id])
    assert sum(row.quantity for row in rows) == sum(event.quantity for event in [*events, events[0]])


def test_between_two_moments(spark: SparkSession, topic: Settings, publisher: Publisher) -> None:
    events = publisher.events(30)
    publisher.send(events[:10])
    start = later()
    publisher.send(events[10:20])
    end = later()
    publisher.send(events[20:])
    assert ids(spark, topic, start=start, end=end) == sent(events[10:20])
    assert ids(spark, topic, start=end) == sent(events[20:])
    assert ids(spark, topic, end=start) == sent(events[:10])
    assert ids(spark, topic, start=end, end=start) == []
    assert ids(spark, topic, start=datetime.now(UTC) + timedelta(days=1)) == []


def test_a_moment_without_a_zone_or_an_unknown_event_is_refused(spark: SparkSession, topic: Settings) -> None:
    with raises("moment-without-zone"):
        outbox.spark.events(spark, topic, ["item"], start=datetime(2026, 11, 24))
    with raises("event-undeclared"):
        outbox.spark.events(spark, topic, ["nothing"])


def test_events_of_several_topics_and_versions_have_their_own_columns(
    spark: SparkSession, topic: Settings, publisher: Publisher
) -> None:
    items, key = publisher.events(5), nth_key(1)
    publisher.send(items)
    orders = [placed(key, 1, quantity=3), placed(nth_key(2), 1, unit="LTR"), cancelled(key, 2)]
    publisher.send_records(topic_of(topic, "order"), orders)
    found = outbox.spark.events(spark, topic, ["item", "order"])
    counts = {row.outbox_topic: row["count"] for row in found.groupBy("outbox_topic").count().collect()}
    assert counts == {topic_of(topic, "item"): 5, topic_of(topic, "order"): 3}
    units = found.where("event_type = 'order.placed'").orderBy("unit").select("order_id", "unit").collect()
    assert [tuple(row) for row in units] == [(nth_key(2), "LTR"), (key, "PCE")]
    assert ids(spark, topic, ["order.cancelled"]) == [(dict(orders[2].headers)["id"] or b"").decode()]


def test_a_topic_that_drops_records_meanwhile_fails_the_job(
    spark: SparkSession, topic: Settings, publisher: Publisher
) -> None:
    publisher.send(publisher.events(20))
    found = outbox.spark.events(spark, topic, ["item"])
    admin, name = AdminClient(client_config(topic)), topic_of(topic)
    ends = topics.high_watermarks(topic, name).items()
    for request in admin.delete_records([TopicPartition(name, number, end) for number, end in ends]).values():
        request.result(30)
    with pytest.raises(Exception, match="no longer has"):
        found.count()
