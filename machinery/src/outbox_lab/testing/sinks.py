"""A sink without Kafka: apply records, be rebuilt from the source, be compared with it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any
from uuid import UUID

from outbox.audit import rows
from outbox.base.database import connect
from outbox.base.settings import Settings, SinkRole, SourceRole
from outbox.events.schema import EventSchema
from outbox.kafka.topics import Topic
from outbox.sink import comparison_files, discovery
from outbox.sink.decoding.batch import Batch
from outbox.sink.decoding.decoder import DAY_MS
from outbox.sink.decoding.records import DeadRecord, Place, Record, Records
from outbox.sink.repair.rebuild import from_source
from outbox.sink.spec import SinkSpec, Transformed
from outbox.sink.writer import Counts, SinkWriter

TOPIC_ID = "topic-1"
MADE_AT_MS = 20_000 * DAY_MS  # by the ids of made-up events; in October 2024


class Driver:
    """A sink's driver without Kafka, and without Spark unless the job has a transform: its own transactions on its own
    tables. It starts with the first batch, and again with the first one after `close`.
    """

    def __init__(self, settings: Settings, spec: SinkSpec, transform: Transformed | None = None) -> None:
        self._settings, self._spec, self._transform = settings, spec, transform
        self._open = ExitStack()
        self._writer: SinkWriter | None = None
        self._on_topics: dict[str, Mapping[Place, Record]] = {}  # those of the last batch

    @property
    def writer(self) -> SinkWriter:
        """The writer of the driver that runs; a driver is started if none does."""
        if self._writer is None:
            connection = self._open.enter_context(closing(connect(self._settings, SinkRole.WRITER)))
            self._writer = self._spec.target.writer(self._settings, connection, self._spec, self._fetch)
            if self._transform is not None:
                self._writer.prepare(self._transform.schema)
        return self._writer

    def apply(self, topic: str, records: Mapping[Place, Record], dead: Sequence[DeadRecord] = ()) -> Counts:
        """Apply records of a topic, and those that are said to be ``dead``, as one batch.

        Raises Failure if the sink refuses the batch.
        """
        self._on_topics[topic] = {**records, **{(one.partition, one.offset): one.record for one in dead}}
        stored = self.writer.positions(topic, TOPIC_ID)
        offsets: dict[int, list[int]] = {}
        for partition, offset in self._on_topics[topic]:
            offsets.setdefault(partition, []).append(offset)
        start = {partition: min(*of, stored.get(partition, 0)) for partition, of in offsets.items()}
        end = {partition: max(of) + 1 for partition, of in offsets.items()}
        decoded = self._spec.decoders[topic].decode(at_places([*records.values()], [*records]))
        chunk = self._spec.chunking(topic).of_decoded(decoded._replace(dead=[*decoded.dead, *dead]))
        batch = Batch(topic, TOPIC_ID, start, end, chunk)
        if self._transform is not None and chunk.events is not None:
            batch = replace(batch, returned=self._transform.apply(topic, chunk.events))
        return self.writer.apply(batch)

    def close(self) -> None:
        """End the driver."""
        for connection in () if self._writer is None else self._writer.connections:
            connection.close()
        self._writer = None
        self._open.close()

    def _fetch(self, topic: str, places: Collection[Place]) -> list[tuple[Place, Record]]:
        return [(place, self._on_topics[topic][place]) for place in places]


def deliver(settings: Settings, records: Sequence[dict[str, Any]], sink: str) -> Counts:
    """Apply records as the next batches of a sink, without Kafka and Spark: its own transactions on its own tables.

    There is a batch for each topic that the sink reads, in the order of the topics' first records. Returns what all of
    them come to.
    """
    chosen, counts = discovery.chosen(settings, sink), Counts()
    topics = dict.fromkeys(record["topic"] for record in records if record["topic"] in chosen.decoders)
    with closing(Driver(settings, chosen)) as driver:
        for topic in topics:
            start = driver.writer.positions(topic, TOPIC_ID).get(0, 0)
            read = [_as_kafka_has_it(one) for one in records if one["topic"] == topic]
            applied = driver.apply(topic, {(0, offset): record for offset, record in enumerate(read, start)})
            counts = Counts(*map(sum, zip(counts, applied, strict=True)))
    return counts


def rebuild(settings: Settings, sink: str) -> dict[str, Any]:
    """Set a sink to what the source says, as `outbox rebuild SINK --from source` does. Returns by key how much more the
    sink holds now; or where a comparison declares the table, by column the values before and after. A row that did not
    exist, or that is deleted, has None there.

    Raises Failure if the sink cannot be rebuilt.
    """
    chosen = discovery.chosen(settings, sink)
    topics = [Topic(name, TOPIC_ID, 1) for name in chosen.topics]
    first = {topic.name: {0: 0} for topic in topics}
    found = from_source(settings, chosen, topics, first, kept=sys.maxsize)
    changed = {
        one.key: {name: (before, after) for name, (after, before) in one.columns.items()}
        for differences in found.rows.values()
        for one in differences.worst
    }
    return {**found.differences, **changed}


def differing_keys(settings: Settings, sink: str) -> dict[str, set[str]]:
    """By comparison of a sink the keys whose totals or rows differ between the source and the sink.

    It is for a sink that has applied every event: `outbox check` also subtracts what a sink has not applied yet. A
    comparison without a section ``[sink]`` is left out. Raises Failure if a comparison cannot be used.
    """
    found = dict[str, set[str]]()
    with closing(connect(settings, SourceRole.AUDITOR)) as source, closing(connect(settings, SinkRole.AUDITOR)) as held:
        for one in comparison_files.load(discovery.chosen(settings, sink)):
            if one.sink is not None or one.table is not None:
                described = rows.describe(source, one)
                due = {key: columns for _, key, _, columns in rows.read_source(source, described)}
                has = {key: columns for name, key, _, columns in rows.read_sinks(held, described) if name == sink}
                absent = None if described.columns else "0"
                found[one.name] = {key for key in {*due, *has} if due.get(key, absent) != has.get(key, absent)}
    return found


def at_places(records: Sequence[Record], places: Sequence[tuple[int, int]]) -> Records:
    """Records as they are read from these places (partition, offset) of their topic."""
    return Records(
        keys=[record.key for record in records],
        headers=[record.headers for record in records],
        values=[record.value for record in records],
        recorded_ms=[record.recorded_ms for record in records],
        partitions=[partition for partition, _ in places],
        offsets=[offset for _, offset in places],
    )


def made_id(number: int) -> str:
    """The id of a made-up event."""
    return str(UUID(int=MADE_AT_MS << 80 | 7 << 76 | 2 << 62 | number))


def made_record(schema: EventSchema, key: str, event_id: str, payload: Mapping[str, Any]) -> Record:
    """The record of a made-up event, as the connector writes it."""
    headers = {"id": event_id, "eventType": schema.type, "schemaVersion": str(schema.version)}
    encoded = [(name, text.encode()) for name, text in headers.items()]
    return Record(key.encode(), encoded, json.dumps(payload).encode(), MADE_AT_MS)


def _as_kafka_has_it(record: dict[str, Any]) -> Record:
    headers = [(name, None if text is None else text.encode()) for name, text in record["headers"].items()]
    return Record(record["key"].encode(), headers, json.dumps(record["value"]).encode(), round(time.time() * 1000))
