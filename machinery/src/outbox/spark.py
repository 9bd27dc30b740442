"""The public API for DataFrames: the events of topics between two moments, for notebooks and backfills (docs/spark.md).

    from outbox.spark import events, session

It only reads. Tasks read the topics with the client that the sinks read with, and decode with the same decoder. So a
row is what a sink would see: the same columns, upcast to the newest version. Records that a sink would set aside, and
events that were not asked for, have no row; `outbox check` counts the former. Delivery is at least once, so an event
may have several rows, at several places: `dropDuplicates(["event_id"])` keeps one.

It needs pandas, because PySpark's `mapInArrow` asks for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from outbox.base.errors import Failure
from outbox.base.settings import Settings
from outbox.kafka import topics
from outbox.kafka.records import Part, batches
from outbox.sink.decoding.decoder import RecordDecoder
from outbox.sink.decoding.layout import Layout
from outbox.sink.decoding.records import Records
from outbox.sink.discovery import event_decoders
from outbox.sink.spark.session import session
from outbox.sink.spark.transform import as_events, frame_schema

__all__ = ["events", "session"]

TASK_MAX_RECORDS = 200_000


def events(
    spark: SparkSession,
    settings: Settings,
    names: Sequence[str],
    *,
    start: datetime | None = None,
    end: datetime | None = None,
) -> DataFrame:
    """The events of these names that are on their topics between two moments, in no particular order.

    ``names`` are as in a job: ``order``, ``order.placed`` or ``order.placed.v1``. From ``start`` on, or from the first
    record that the topics still have; up to ``end``, which is excluded, or to what is committed now. The records'
    timestamps count. Later records are not read, however often the DataFrame is computed; each time it reads the topics
    again, so `cache` it if that is too often.

    Columns: ``outbox_topic``, ``event_id``, ``partition``, ``offset``, ``event_type`` if there are several events, and
    the properties of the payloads (`outbox.sink.decoding.layout`), of which numeric and jsonb ones are text.

    Raises Failure if a name is unknown, if Kafka is unavailable, or for a moment without a zone. A topic that drops
    records while they are read makes the Spark job fail, with ``events-lost``.
    """
    decoders = event_decoders(settings, names)
    return events_within(spark, settings, decoders, [_range(settings, topic, start, end) for topic in sorted(decoders)])


def events_within(
    spark: SparkSession, settings: Settings, decoders: Mapping[str, RecordDecoder], ranges: Sequence[Part]
) -> DataFrame:
    """The events within ranges of offsets, with the columns of `events`."""
    layout = Layout.of_decoders(decoders)
    shares = [share for one in ranges for share in one.in_parts(TASK_MAX_RECORDS)]
    read = EventsTask(settings.without_secrets("kafka_password"), decoders, layout, shares)
    if not shares:
        return spark.createDataFrame([], frame_schema(layout))
    return spark.range(0, len(shares), 1, len(shares)).mapInArrow(read, frame_schema(layout))


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


def _range(settings: Settings, topic: str, start: datetime | None, end: datetime | None) -> Part:
    marks = topics.watermarks(settings, topic)
    first, last = ({partition: mark[place] for partition, mark in marks.items()} for place in (0, 1))
    begin, until = _offsets(settings, topic, start, first, last), _offsets(settings, topic, end, last, last)
    return Part(topic, {partition: min(begin[partition], until[partition]) for partition in until}, until)


def _offsets(
    settings: Settings, topic: str, moment: datetime | None, otherwise: Mapping[int, int], last: Mapping[int, int]
) -> Mapping[int, int]:
    """By partition the offset of a moment."""
    if moment is None:
        return otherwise
    if moment.tzinfo is None:
        raise Failure(f"{moment} has no time zone", "add one, such as tzinfo=UTC", code="moment-without-zone")
    since = topics.offsets_since(settings, topic, moment)
    return {partition: min(since.get(partition, end), end) for partition, end in last.items()}
