"""The events of topics between two points as a DataFrame, for notebooks and backfills (docs/spark.md). It only reads.

Tasks read the topics with the client that the sinks read with, and decode with the same decoder. So a row is what a
sink would see: the same columns, upcast to the newest version. Records that a sink would set aside, and events that
were not asked for, have no row; `outbox check` counts the former. Delivery is at least once, so an event may have
several rows, at several places: `dropDuplicates(["event_id"])` keeps one.

It needs pandas, because PySpark's `mapInArrow` asks for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import (
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from outbox.base.errors import Failure
from outbox.base.settings import Settings
from outbox.kafka import topics
from outbox.kafka.records import Part, batches
from outbox.sink.decoding.decoder import RecordDecoder
from outbox.sink.decoding.layout import Layout
from outbox.sink.decoding.records import Records
from outbox.sink.decoding.values import schema_of
from outbox.sink.discovery import event_decoders

Point = datetime | Mapping[str, Mapping[int, int]]  # a moment, or offsets by topic and partition

TASK_MAX_RECORDS = 200_000
# Of a sink's columns; so are decimals, in what a transform returns.
ARROW_TYPES: Mapping[type[DataType], pa.DataType] = {
    StringType: pa.string(),
    ByteType: pa.int8(),
    ShortType: pa.int16(),
    IntegerType: pa.int32(),
    LongType: pa.int64(),
    FloatType: pa.float32(),
    DoubleType: pa.float64(),
    BooleanType: pa.bool_(),
    TimestampType: pa.timestamp("us", tz="UTC"),
    DateType: pa.date32(),
}
SPARK_TYPES = {of_arrow: of_spark() for of_spark, of_arrow in ARROW_TYPES.items()}
TOPIC = "outbox_topic"  # no property has this name
PLACE = [StructField(field.name, SPARK_TYPES[field.type]) for field in schema_of(())]


def events(
    spark: SparkSession,
    settings: Settings,
    names: Sequence[str],
    *,
    start: Point | None = None,
    end: Point | None = None,
) -> DataFrame:
    """The events of these names that are on their topics between two points, in no particular order.

    ``names`` are as in a job: ``order``, ``order.placed`` or ``order.placed.v1``. From ``start`` on, or from the first
    record that the topics still have; up to ``end``, which is excluded, or to what is committed at this moment. A
    moment counts by the records' timestamps. Later records are not read, however often the DataFrame is computed; each
    time it reads the topics again, so `cache` it if that is too often.

    Columns: ``outbox_topic``, ``event_id``, ``partition``, ``offset``, ``event_type`` if there are several events, and
    the properties of the payloads (`outbox.sink.decoding.layout`), of which numeric and jsonb ones are text.

    Raises Failure if a name is unknown, if Kafka is unavailable, or for an offset that a topic does not have. A topic
    that drops records while they are read makes the Spark job fail, with ``events-lost``.
    """
    decoders = event_decoders(settings, names)
    layout = Layout.of_decoders(decoders)
    ranges = [_range(settings, topic, start, end) for topic in sorted(decoders)]
    shares = [share for one in ranges for share in one.in_parts(TASK_MAX_RECORDS)]
    read = EventsTask(settings.without_secrets("kafka_password"), decoders, layout, shares)
    if not shares:
        return spark.createDataFrame([], schema(layout))
    return spark.range(0, len(shares), 1, len(shares)).mapInArrow(read, schema(layout))


def schema(layout: Layout) -> StructType:
    """The columns of a layout as Spark has them, behind the place of each event."""
    columns = (StructField(field.name, SPARK_TYPES[field.type]) for field in layout.schema)
    return StructType([StructField(TOPIC, StringType()), *columns])


def as_events(rows: pa.Table, topic: str) -> pa.Table:
    """Rows of a layout with their topic, as in `schema`."""
    return rows.add_column(0, TOPIC, pa.repeat(topic, rows.num_rows))


@dataclass(frozen=True)
class EventsTask:
    """The function that an executor runs for the numbers of shares: it reads and decodes them."""

    settings: Settings
    decoders: Mapping[str, RecordDecoder]
    layout: Layout
    shares: Sequence[Part]

    def __call__(self, numbers: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The events of these shares."""
        for batch in numbers:
            for number in batch["id"].to_pylist():
                yield from self._read(self.shares[number])

    def _read(self, share: Part) -> Iterator[pa.RecordBatch]:
        decoder = self.decoders[share.topic]
        for messages in batches(self.settings, share.topic, share.within, at_least=decoder.at_once, require_all=True):
            rows = self.layout.table(decoder.decode(Records.of_messages(messages)).rows)
            yield from as_events(rows, share.topic).combine_chunks().to_batches()


def _range(settings: Settings, topic: str, start: Point | None, end: Point | None) -> Part:
    marks = topics.watermarks(settings, topic)
    begin = _offsets(settings, topic, start, {partition: first for partition, (first, _) in marks.items()}, marks)
    until = _offsets(settings, topic, end, {partition: last for partition, (_, last) in marks.items()}, marks)
    return Part(topic, {partition: min(begin[partition], until[partition]) for partition in until}, until)


def _offsets(
    settings: Settings,
    topic: str,
    point: Point | None,
    otherwise: Mapping[int, int],
    marks: Mapping[int, tuple[int, int]],
) -> dict[int, int]:
    """By partition the offset of a point."""
    if point is None:
        return dict(otherwise)
    if isinstance(point, datetime):
        if point.tzinfo is None:
            raise Failure(f"{point} has no time zone", "add one, such as tzinfo=UTC", code="moment-without-zone")
        since = topics.offsets_since(settings, topic, point)
        return {partition: min(since.get(partition, last), last) for partition, (_, last) in marks.items()}
    given = point.get(topic, {})
    for partition, offset in given.items():
        first, last = marks.get(partition, (0, -1))
        if not first <= offset <= last:
            there = f"{first} to {last}" if partition in marks else f"partitions {', '.join(map(str, sorted(marks)))}"
            raise Failure(
                f"topic {topic} has no offset {offset} in partition {partition}",
                f"it has {there}",
                code="offset-unknown",
            )
    return {**otherwise, **given}
