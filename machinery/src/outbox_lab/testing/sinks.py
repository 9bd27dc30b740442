"""A sink without Kafka and Spark: apply records, be rebuilt from the source, be compared with it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
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
from outbox.sink.decoding.records import Place, Record, Records
from outbox.sink.repair.rebuild import from_source
from outbox.sink.writer import Counts

TOPIC_ID = "topic-1"
MADE_AT_MS = 20_000 * DAY_MS  # by the ids of made-up events; in October 2024


def deliver(settings: Settings, records: Sequence[dict[str, Any]], sink: str) -> Counts:
    """Apply records as the next batches of a sink, without Kafka and Spark: its own transactions on its own tables.

    There is a batch for each topic that the sink reads, in the order of the topics' first records. Returns what all of
    them come to.
    """
    chosen = discovery.chosen(settings, sink)
    topics = dict.fromkeys(record["topic"] for record in records if record["topic"] in chosen.decoders)
    with closing(connect(settings, SinkRole.WRITER)) as connection:
        on_topic: dict[str, dict[Place, Record]] = {}

        def fetch(topic: str, places: Collection[Place]) -> list[tuple[Place, Record]]:
            return [(place, on_topic[topic][place]) for place in places]

        writer = chosen.target.writer(settings, connection, chosen, fetch)
        counts = []
        for topic in topics:
            start = writer.positions(topic, TOPIC_ID).get(0, 0)
            read = [_as_kafka_has_it(one) for one in records if one["topic"] == topic]
            on_topic[topic] = {(0, offset): record for offset, record in enumerate(read, start)}
            chunk = chosen.chunking(topic).chunk(at_places(read, [*on_topic[topic]]))
            counts.append(writer.apply(Batch(topic, TOPIC_ID, {0: start}, {0: start + len(read)}, chunk)))
    return Counts(*map(sum, zip(Counts(), *counts, strict=True)))


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
