"""What a service has put into the outbox, as the topic would carry it; and delivered to a sink without a topic."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import closing
from typing import Any

from outbox.base.database import connect
from outbox.base.settings import Settings, SinkRole
from outbox.events import catalog
from outbox.events.schema import Rejection
from outbox.sink import discovery
from outbox.sink.batch import Batch, DeadRecord
from outbox.sink.decoder import DecodedEvent, RecordDecoder
from outbox.sink.records import Record
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
    return _sum(counts)


def _apply(writer: SinkWriter, decoder: RecordDecoder, topic: str, records: Sequence[dict[str, Any]]) -> Counts:
    start = writer.positions(topic, TOPIC_ID).get(0, 0)
    events, dead = list[tuple[DecodedEvent, int, int]](), list[DeadRecord]()
    skipped = Counter[str]()
    for offset, record in enumerate(map(_as_kafka_has_it, records), start):
        found = decoder.record(record)
        if isinstance(found, DecodedEvent):
            events.append((found, 0, offset))
        elif isinstance(found, Rejection):
            dead.append(DeadRecord(0, offset, record, decoder.event_id(record), found))
        else:
            skipped[found.name] += 1
    end = start + len(records)
    return writer.apply(Batch(topic, TOPIC_ID, {0: start}, {0: end}, decoder.rows(events), dead, skipped=skipped))


def _sum(counts: Iterable[Counts]) -> Counts:
    return Counts(*map(sum, zip(Counts(), *counts, strict=True)))


def _as_kafka_has_it(record: dict[str, Any]) -> Record:
    headers = [(name, None if text is None else text.encode()) for name, text in record["headers"].items()]
    return Record(record["key"].encode(), headers, json.dumps(record["value"]).encode(), round(time.time() * 1000))
