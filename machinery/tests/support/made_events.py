"""Events made up for the sinks, as rows of batches, and what a sink's totals are when they are applied."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from random import Random

from outbox.base.settings import load
from outbox.events.schema import Rejection
from outbox.sink import discovery
from outbox.sink.decoding import records
from outbox.sink.decoding.batch import Batch, Chunk
from outbox.sink.decoding.decoder import DecodedEvent
from outbox.sink.decoding.records import DeadRecord, Decoded
from outbox.sink.spec import SinkSpec
from outbox_lab.testing.sinks import at_places
from tests import items

ALL = discovery.sinks(load(environment=False))
MAIN = next(one for one in ALL.values() if one.strategy.name == "dedup" and one.job.events == [items.AGGREGATE])
JOB = MAIN.job
SPECS = {one.strategy.name: one for one in ALL.values() if one.job.projections == JOB.projections}
STRATEGIES = {name: one.strategy for name, one in SPECS.items()}
PROJECTIONS = JOB.projections
[TOPIC] = MAIN.topics
DECODER = MAIN.decoders[TOPIC]
TOPIC_ID = "topic-1"
NOW_MS = int(time.time() * 1000)
DAY_MS = 24 * 60 * 60 * 1000


def uuid7(random: Random, at_ms: int = NOW_MS) -> str:
    number = at_ms << 80 | 7 << 76 | random.getrandbits(12) << 64 | 2 << 62 | random.getrandbits(62)
    return str(uuid.UUID(int=number))


def nth_key(number: int) -> str:
    return str(uuid.UUID(int=number))


@dataclass(frozen=True)
class Event:
    """An event, without the place it was read from."""

    event_id: str
    key: str
    quantity: int
    version: int
    unit: str = items.UNIT
    total_after: int = 0

    @property
    def type(self) -> str:
        return items.type_of(self.quantity)

    @property
    def name(self) -> str:
        return f"{items.AGGREGATE}.{self.type}"

    @property
    def decoded(self) -> DecodedEvent:
        """The event as the decoder returns it."""
        values = {**self.payload(), "occurred_at": datetime.now(UTC)}
        columns = DECODER.types[self.name]
        return DecodedEvent(self.event_id, tuple(values[column.name] for column in columns), self.name)

    @property
    def record(self) -> records.Record:
        headers = {"id": self.event_id, "eventType": self.type, "schemaVersion": "1"}
        encoded = [(name, text.encode()) for name, text in headers.items()]
        return records.Record(self.key.encode(), encoded, json.dumps(self.payload()).encode(), NOW_MS)

    def payload(self) -> dict[str, object]:
        return items.payload(
            self.event_id, self.key, self.quantity, self.version, unit=self.unit, total_after=self.total_after
        )


# What is on the topics of these tests: by topic and place, the record of the last batch that was made there.
ON_TOPICS: dict[tuple[str, records.Place], records.Record] = {}


def fetch(topic: str, places: Collection[records.Place]) -> Iterator[tuple[records.Place, records.Record]]:
    """The records at these places, as a sink reads them for its dead letters."""
    return ((place, ON_TOPICS[topic, place]) for place in places)


def batch(events: Sequence[Event], start: int = 0, *, partition: int = 0, dead: Sequence[DeadRecord] = ()) -> Batch:
    """A batch of one partition, which ends behind its last event and these dead records."""
    places = range(start, start + len(events))
    ON_TOPICS.update({(TOPIC, (partition, place)): event.record for event, place in zip(events, places, strict=True)})
    rows = DECODER.rows((event.decoded, partition, place) for event, place in zip(events, places, strict=True))
    end = start + len(events) + len(dead)
    return Batch(TOPIC, TOPIC_ID, {partition: start}, {partition: end}, chunk_of(Decoded(rows, dead)))


def chunk_of(decoded: Decoded, spec: SinkSpec = MAIN, topic: str = TOPIC) -> Chunk:
    """The chunk of records that are decoded, for a sink of any target: with the events as a table too."""
    chunking = spec.chunking(topic)
    events = replace(chunking, as_frame=True).of_decoded(decoded).events
    return replace(replace(chunking, as_frame=False).of_decoded(decoded), events=events)


def dead_record(
    offset: int,
    event_id: str | None = None,
    value: bytes | None = b"bad",
    *,
    key: bytes | None = b"key",
    reason: str = "not JSON",
) -> DeadRecord:
    """A record that is no event."""
    record = records.Record(key, [("h", b"\xff")], value, NOW_MS)
    return DeadRecord(0, offset, record, event_id, Rejection(reason, "a detail"))


def as_read(*read: records.Record, partition: int = 3, start: int = 0) -> records.Records:
    """Records as they are read, from an offset on."""
    return at_places(read, [(partition, offset) for offset in range(start, start + len(read))])


def sums(events: Iterable[Event]) -> Mapping[str, int]:
    """The totals when each of these is applied."""
    totals: dict[str, int] = {}
    for event in events:
        totals[event.key] = totals.get(event.key, 0) + event.quantity
    return totals
