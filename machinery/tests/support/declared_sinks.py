"""Sinks of events that a test has declared (`tests.support.declared`)."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

from outbox.events.catalog import Catalog
from outbox.sink.applying.postgres.target import PostgresTarget
from outbox.sink.decoding.batch import Batch
from outbox.sink.decoding.decoder import EventDecoder
from outbox.sink.decoding.records import Record
from outbox.sink.remembering import strategy
from outbox.sink.spec import SinkJob, SinkSpec
from tests.support.made_events import NOW_MS, ON_TOPICS, TOPIC_ID, as_read, chunk_of, uuid7

RANDOM = Random(22)  # noqa: S311


def decoders(known: Catalog, *names: str) -> dict[str, EventDecoder]:
    """By topic, the decoder of the events of these names."""
    wanted = known.wanted(names)
    return {
        topic: EventDecoder(aggregates, mine)
        for topic, aggregates in known.topics.items()
        if (mine := [one for one in wanted if known.aggregates[one.schema.aggregate] in aggregates])
    }


def decoder(known: Catalog, *names: str) -> EventDecoder:
    """The decoder of the events of these names, which are on one topic."""
    (found,) = decoders(known, *names).values()
    return found


def sink(
    known: Catalog, *names: str, projections: Path, name: str = "orders", by: str | Path = "dedup", topic: str = ""
) -> SinkSpec:
    """A sink of these events, on all their topics or on one of them."""
    found = {of: one for of, one in decoders(known, *names).items() if topic in ("", of)}
    job = SinkJob(name=name, projections=projections, events=names, strategy=by)
    return SinkSpec(name, job, strategy.find(by), found, PostgresTarget())


def record(
    type_: str, payload: Any, version: object = 1, *, key: str | None = None, event_id: str | None = None
) -> Record:
    """A record of an event. Its key is the payload's ``id`` unless another is given."""
    headers = {"id": event_id or uuid7(RANDOM), "eventType": type_, "schemaVersion": str(version)}
    own_key = payload.get("id") if key is None and isinstance(payload, dict) else key
    encoded = [(name, text.encode()) for name, text in headers.items()]
    return Record(None if own_key is None else str(own_key).encode(), encoded, json.dumps(payload).encode(), NOW_MS)


def batch_of(spec: SinkSpec, topic: str, *records: Record, start: int = 0) -> Batch:
    """The records as a batch of partition 0, decoded as the sink decodes them."""
    end = start + len(records)
    read = as_read(*records, partition=0, start=start)
    ON_TOPICS.update({(topic, (0, offset)): record for offset, record in enumerate(records, start)})
    return Batch(topic, TOPIC_ID, {0: start}, {0: end}, chunk_of(spec.decoders[topic].decode(read), spec, topic))
