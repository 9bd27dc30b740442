"""What a service has put into the outbox, as the topic would carry it; and delivered to a sink without a topic."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import closing
from typing import Any

from outbox.base.database import connect
from outbox.base.settings import Settings, SinkRole
from outbox.events.schema import Rejection
from outbox.sink import spec
from outbox.sink.batch import Batch, DeadRecord
from outbox.sink.records import Event, Record
from outbox.sink.writer import Counts
from tests.support.queries import query

TOPIC_ID = "topic-1"


def as_records(settings: Settings) -> list[dict[str, Any]]:
    """The events in the outbox table, the oldest first, as a record of the topic would carry them."""
    rows = query(
        settings, "SELECT id::text, aggregateid, type, schema_version, payload, traceparent FROM outbox ORDER BY id"
    )
    return [
        {
            "key": key,
            "headers": {"id": id_, "eventType": type_, "schemaVersion": str(version), "traceparent": traceparent},
            "value": payload,
        }
        for id_, key, type_, version, payload, traceparent in rows
    ]


def deliver(settings: Settings, records: Sequence[dict[str, Any]], sink: str = "dedup") -> Counts:
    """Apply records as the next batch of a sink: its own transaction on its own tables, without Kafka and Spark."""
    chosen = spec.sinks(settings)[sink]
    [(topic, decoder)] = chosen.decoders.items()
    with closing(connect(settings, SinkRole.WRITER)) as connection:
        writer = chosen.job.target.writer(settings, connection, chosen)
        start = writer.positions(topic, TOPIC_ID).get(0, 0)
        events, places, dead = dict[str, list[Event]](), dict[str, list[tuple[int, int]]](), list[DeadRecord]()
        for offset, record in enumerate(map(_as_kafka_has_it, records), start):
            found = decoder.record(record)
            if isinstance(found, Event):
                events.setdefault(found.name, []).append(found)
                places.setdefault(found.name, []).append((0, offset))
            elif isinstance(found, Rejection):
                dead.append(DeadRecord(0, offset, record, decoder.event_id(record), found))
        end = start + len(records)
        rows = {name: decoder.rows(name, of, places[name]) for name, of in events.items()}
        return writer.apply(Batch(topic, TOPIC_ID, {0: start}, {0: end}, rows, dead))


def _as_kafka_has_it(record: dict[str, Any]) -> Record:
    headers = [(name, None if text is None else text.encode()) for name, text in record["headers"].items()]
    return Record(record["key"].encode(), headers, json.dumps(record["value"]).encode(), round(time.time() * 1000))
