"""What a service has put into the outbox, as the topic would carry it; and delivered to a sink without a topic."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import closing
from typing import Any

from outbox.base.database import connect
from outbox.base.settings import Settings, SinkRole
from outbox.events import catalog
from outbox.sink import discovery
from outbox.sink.batch import Batch
from outbox.sink.decoder import RecordDecoder
from outbox.sink.records import Record, Records
from outbox.sink.writer import Counts, SinkWriter
from outbox.testing.queries import query

TOPIC_ID = "topic-1"


def outbox_records(settings: Settings) -> list[dict[str, Any]]:
    """The events in the outbox table, the oldest first, as a record of the topic would carry them."""
    topics = {name: aggregate.topic for name, aggregate in catalog.of(settings).aggregates.items()}
    rows = query(
        settings,
        "SELECT id::text, aggregatetype, aggregateid, type, schema_version, payload, traceparent"
        " FROM outbox ORDER BY id",
    )
    return [
        {
            "topic": topics[aggregate],
            "key": key,
            "headers": {"id": id_, "eventType": type_, "schemaVersion": str(version), "traceparent": traceparent},
            "value": payload,
        }
        for id_, aggregate, key, type_, version, payload, traceparent in rows
    ]


def deliver(settings: Settings, records: Sequence[dict[str, Any]], sink: str) -> Counts:
    """Apply records as the next batches of a sink, without Kafka and Spark: its own transactions on its own tables.

    There is a batch for each topic that the sink reads, in the order of the topics' first records. Returns what all of
    them come to.
    """
    chosen = discovery.chosen(settings, sink)
    topics = dict.fromkeys(record["topic"] for record in records if record["topic"] in chosen.decoders)
    with closing(connect(settings, SinkRole.WRITER)) as connection:
        writer = chosen.target.writer(settings, connection, chosen)
        counts = [
            _apply(writer, chosen.decoders[topic], topic, [one for one in records if one["topic"] == topic])
            for topic in topics
        ]
    return Counts(*map(sum, zip(Counts(), *counts, strict=True)))


def _apply(writer: SinkWriter, decoder: RecordDecoder, topic: str, records: Sequence[dict[str, Any]]) -> Counts:
    start = writer.positions(topic, TOPIC_ID).get(0, 0)
    places = [(0, offset) for offset, _ in enumerate(records, start)]
    found = decoder.decode(at_places(list(map(_as_kafka_has_it, records)), places))
    end = start + len(records)
    return writer.apply(Batch(topic, TOPIC_ID, {0: start}, {0: end}, found.rows, found.dead, skipped=found.skipped))


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


def _as_kafka_has_it(record: dict[str, Any]) -> Record:
    headers = [(name, None if text is None else text.encode()) for name, text in record["headers"].items()]
    return Record(record["key"].encode(), headers, json.dumps(record["value"]).encode(), round(time.time() * 1000))
