"""A sink with a transform: what its projections see, and what becomes of events that are filtered, fail or repeat.
And DataFrames of events without a sink.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import outbox.spark
from outbox.base.database import query
from outbox.base.settings import Settings, SinkRole
from outbox.kafka import topics
from outbox.sink import discovery
from outbox.sink.repair.replay import Replayed
from outbox.sink.spark import reader
from outbox.sink.writer import Counts
from outbox_lab.testing.failures import raises
from outbox_lab.testing.fixtures.spark import leaves_sockets
from tests import transforms
from tests.orders import cancelled, placed
from tests.seen import PROJECTION, create_tables
from tests.support import transformed
from tests.support.made_events import Event, nth_key
from tests.support.sink_driver import projections_in
from tests.support.sink_process import Publisher
from tests.support.topic_reader import drop_records, later, topic_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = leaves_sockets

SINK = "weights"
FEW, MANY = 40, 450  # that the driver reads itself, and that executors read
SIZES = pytest.mark.parametrize("count", [FEW, MANY], ids=["few", "many"])


class Sink(transformed.Sink):
    """A sink of items with a transform, whose projection writes down what it sees."""

    def refuse(self, *event_ids: str) -> None:
        """The events that the projection refuses from now on."""
        query(self.settings, SinkRole.OWNER, "DELETE FROM unwelcome")
        query(self.settings, SinkRole.OWNER, "INSERT INTO unwelcome SELECT unnest(%s::uuid[])", [[*event_ids]])

    def rows(self) -> list[dict[str, Any]]:
        """Rows that the projection has seen, in its order."""
        return [event for (event,) in query(self.settings, SinkRole.OWNER, "SELECT event FROM seen ORDER BY line")]

    def letters(self) -> dict[str, str]:
        return self.database.dead_letters()


@pytest.fixture
def sink(topic: Settings, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sink:
    create_tables(topic)
    monkeypatch.setattr(reader, "TASK_MIN_RECORDS", 100)  # so that a part has two tasks
    projections = projections_in(tmp_path, PROJECTION, "seen")
    job = replace(discovery.sinks(topic)["dedup"].job, name=SINK, projections=projections)
    return Sink(topic, spark, job, transforms.weighed.__name__)


def of_units(publisher: Publisher, count: int) -> list[Event]:
    """Events of three units, one of which is no weight."""
    units = ["KGM", "GRM", "LTR"]
    return [replace(event, unit=units[number % 3]) for number, event in enumerate(publisher.events(count))]


# Without tasks there is no shuffle.
@pytest.mark.parametrize(("transform", "count"), [("weighed", FEW), ("weighed", MANY), ("shuffled", MANY)])
def test_projections_see_what_it_returns(sink: Sink, publisher: Publisher, count: int, transform: str) -> None:
    sink.transform = transform
    events = of_units(publisher, count)
    publisher.send(events)
    kept = {event.event_id: event for event in events if event.unit in transforms.GRAMS}
    assert sink.run() == Counts(rows=count, applied=len(kept), filtered=count - len(kept))
    rows = {row["event_id"]: row for row in sink.rows()}
    assert rows.keys() == kept.keys()
    for event_id, event in kept.items():
        weight = event.quantity * transforms.GRAMS[event.unit]
        row = rows[event_id]
        assert (row["weight"], row["day"], row["share"]) == (weight, "2026-11-21", event.quantity / 4)
        assert (row["quantity"], row["unit"], row["version"]) == (event.quantity, event.unit, event.version)
        assert not {"stock_after", "grams", "outbox_topic"} & row.keys()
    assert sink.run(from_start=True) == Counts(rows=count, duplicates=count), "what was filtered is known too"
    assert len(sink.rows()) == len(kept)


@pytest.mark.parametrize(
    ("transform", "column", "value"),
    [
        ("read_twice", "again", lambda quantity: quantity),
        ("in_pandas", "tag", "{:08x}".format),
        ("in_arrow", "tag", "{:08x}".format),
    ],
)
def test_a_transform_may_read_its_events_twice_or_run_python(
    sink: Sink, publisher: Publisher, transform: str, column: str, value: Callable[[int], object]
) -> None:
    sink.transform = transform
    publisher.send(publisher.events(MANY))
    publisher.send_raw("key", b"no event", None)
    assert sink.run() == Counts(rows=MANY, applied=MANY, dead=1)
    assert all(row[column] == value(row["quantity"]) for row in sink.rows())


@pytest.mark.parametrize(
    ("transform", "count"), [("failing_in_python", FEW), ("failing_in_python", MANY), ("unreadable", MANY)]
)
def test_an_event_for_which_it_fails_is_set_aside(sink: Sink, publisher: Publisher, count: int, transform: str) -> None:
    sink.transform = transform
    events = publisher.events(count)
    bad = [replace(events[number], quantity=13) for number in (3, count - 5)]
    events[3], events[count - 5] = bad
    publisher.send(events)
    assert sink.run() == Counts(rows=count, applied=count - 2, rejected=2)
    assert sink.letters() == {event.event_id: "transform failed" for event in bad}
    assert {row["event_id"] for row in sink.rows()} == {one.event_id for one in events} - {one.event_id for one in bad}


def test_a_replay_goes_through_the_transform_of_today(sink: Sink, publisher: Publisher) -> None:
    events = publisher.events(MANY)
    failing, refused, left_out = events[3:6]
    failing = events[3] = replace(failing, quantity=13)
    left_out = events[5] = replace(left_out, quantity=transforms.LEFT_OUT)
    publisher.send(events)
    sink.transform = "failing"
    sink.refuse(refused.event_id, left_out.event_id)
    assert sink.run() == Counts(rows=MANY, applied=MANY - 3, rejected=3)
    assert sink.letters() == {
        failing.event_id: "transform failed",
        refused.event_id: "unwelcome",
        left_out.event_id: "unwelcome",
    }
    kept = query(sink.settings, SinkRole.WRITER, "SELECT key, value FROM dead_letters")
    assert {(bytes(key), bytes(value)) for key, value in kept} == {
        (one.record.key, one.record.value) for one in (failing, refused, left_out)
    }, "as they were before the transform"
    assert sink.replay() == Replayed(rejected=3)
    sink.transform = "corrected"
    sink.refuse()
    assert sink.replay() == Replayed(applied=2, filtered=1)
    assert sink.replay() == Replayed()
    resolution = "SELECT event_id::text FROM dead_letters WHERE status = 'replayed' AND resolution = 'filtered'"
    assert query(sink.settings, SinkRole.WRITER, resolution) == [(left_out.event_id,)]
    last = {row["event_id"]: row for row in sink.rows()[-2:]}
    assert last[failing.event_id]["inverse"] is None
    assert last[refused.event_id]["inverse"] == pytest.approx(1 / (refused.quantity - 13))
    assert last[refused.event_id]["stock_after"] == refused.total_after
    assert len(sink.rows()) == MANY - 1


@SIZES
def test_a_transform_that_fails_for_many_stops_the_sink(sink: Sink, publisher: Publisher, count: int) -> None:
    sink.transform = "always_failing"
    publisher.send(publisher.events(count))
    with raises("transform-failed", SINK):
        sink.run()
    assert not sink.rows()
    assert not sink.letters()


@pytest.mark.parametrize(
    ("transform", "count"), [("doubled", FEW), ("doubled", MANY), ("invented", FEW), ("moved", MANY)]
)
def test_a_row_of_another_event_stops_the_sink(sink: Sink, publisher: Publisher, count: int, transform: str) -> None:
    sink.transform = transform
    publisher.send(publisher.events(count))
    with raises("transform-breaks-rule", SINK):
        sink.run()
    assert not sink.rows()


@SIZES
def test_no_event_is_to_blame_for_a_file_that_is_gone(
    sink: Sink, publisher: Publisher, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "units.csv"
    file.write_text("KGM,1000\nGRM,1\nLTR,0\n")
    monkeypatch.setattr(transforms, "FILE", [str(file)])
    publisher.send(of_units(publisher, count))
    sink.transform, sink.started = "with_a_file", file.unlink
    with raises("transform-failed", SINK):
        sink.run()
    assert not sink.letters()
    file.write_text("KGM,1000\nGRM,1\nLTR,0\n")
    sink.started = lambda: None
    assert sink.run() == Counts(rows=count, applied=count)


@pytest.mark.parametrize("transform", ["without_id", "with_an_array", "ambiguous", "of_nothing", "missing"])
def test_one_that_no_sink_can_use_is_refused_at_the_start(sink: Sink, transform: str) -> None:
    sink.transform = transform
    with raises("sink-unusable", SINK):
        sink.run()


# Events between two moments, as a DataFrame of their own ------------------------------------------------------------


def test_a_frame_has_each_committed_event_with_typed_columns(
    spark: SparkSession, topic: Settings, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox.spark, "TASK_MAX_RECORDS", 7)
    events = publisher.events(60)
    publisher.send(events[:40])
    publisher.send(publisher.events(10), abort=True)
    publisher.send_raw(nth_key(1), b"no JSON", None)
    publisher.send([*events[40:], events[0]])
    found = outbox.spark.events(spark, topic, ["item"])
    publisher.send(publisher.events(10))  # later events are not in it
    types = dict(found.dtypes)
    assert (types["event_id"], types["version"], types["occurred_at"]) == ("string", "bigint", "timestamp")
    assert found.rdd.getNumPartitions() > 5, "many tasks read it"
    rows = [(row.event_id, row.quantity) for row in found.collect()]
    assert sorted(rows) == sorted((event.event_id, event.quantity) for event in [*events, events[0]])


def test_frames_of_topics_versions_and_moments(spark: SparkSession, topic: Settings, publisher: Publisher) -> None:
    orders = [placed(nth_key(1), 1, quantity=3), placed(nth_key(2), 1, unit="LTR"), cancelled(nth_key(1), 2)]
    groups, moments = [publisher.events(count) for count in (5, 6, 7)], list[datetime]()
    for events in groups:
        moments.append(later())
        publisher.send(events)
    publisher.send_records(topic_of(topic, "order"), orders)
    _, start, end = moments
    for between, expected in (
        ({"start": start, "end": end}, groups[1]),
        ({"start": end}, groups[2]),
        ({"end": start}, groups[0]),
        ({"start": end, "end": start}, []),
        ({"start": datetime.now(UTC) + timedelta(days=1)}, []),
    ):
        frame = outbox.spark.events(spark, topic, ["item"], **between)
        assert {row.event_id for row in frame.collect()} == {event.event_id for event in expected}
    found = outbox.spark.events(spark, topic, ["item", "order"])
    counts = {row.outbox_topic: row["count"] for row in found.groupBy("outbox_topic").count().collect()}
    assert counts == {topic_of(topic, "item"): 18, topic_of(topic, "order"): 3}
    units = found.where("event_type = 'order.placed'").orderBy("unit").select("order_id", "unit").collect()
    assert [tuple(row) for row in units] == [(nth_key(2), "LTR"), (nth_key(1), "PCE")]
    [row] = outbox.spark.events(spark, topic, ["order.cancelled"]).collect()
    assert row.event_id.encode() == dict(orders[2].headers)["id"]
    with raises("moment-without-zone"):
        outbox.spark.events(spark, topic, ["item"], start=datetime(2026, 11, 24))

    before = outbox.spark.events(spark, topic, ["item"])
    for partition, offset in topics.last_stable_offsets(topic, topic_of(topic)).items():
        drop_records(topic, topic_of(topic), offset, partition)
    with pytest.raises(Exception, match="no longer has"):
        before.count()
