"""Hostile records on the topics, by a producer that is not the relay.

An invalid one becomes a dead letter of every sink that asks for such events. A valid one is a foreign event
(`outbox_lab.soak.foreign`), which the checkers know by its place.
"""

from __future__ import annotations

import json
import random
import time
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import psycopg2
from confluent_kafka import KafkaError, Message, Producer

from outbox.base.errors import Failure
from outbox.base.settings import SinkRole
from outbox.events import catalog
from outbox.events.schema import EventSchema
from outbox.kafka import records, topics
from outbox.kafka.clients import client_config
from outbox.sink.spec import SinkSpec
from outbox_lab.soak import foreign
from outbox_lab.soak.fault import Fault, Make, NotFired, wait_or_not_fired
from outbox_lab.soak.faults import commands
from outbox_lab.soak.foreign import ForeignEvent, ForeignRecord
from outbox_lab.soak.testbed import Testbed

RECORDS = 20
HUGE_BYTES = 900_000
HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
DECADES_MS = 365 * DAY_MS * 30
ANY_PARTITION = -1  # that of the key
Headers = Mapping[str, bytes | None]
Place = tuple[int, int]  # partition and offset
LETTERS_TIMEOUT_S = 300.0  # sinks may be down, or begin again
LETTERS_OF_ALL = "SELECT event_id::text FROM public.dead_letters WHERE topic = %s"
LETTERS = """
SELECT sink, identity, partition, "offset", event_id::text FROM public.dead_letters WHERE topic = %s AND sink = ANY(%s)
"""
POSITIONS = "SELECT sink, partition, next_offset FROM public.positions WHERE topic = %s AND sink = ANY(%s)"


class HostileRecord(NamedTuple):
    """A record for a topic."""

    key: bytes | None
    headers: Headers
    value: bytes | None
    partition: int = ANY_PARTITION
    event: ForeignEvent | None = None  # if it is valid

    @property
    def event_id(self) -> str | None:
        """The id that it claims."""
        claimed = self.headers.get("id")
        return None if claimed is None else claimed.decode()


Delivered = Mapping[Place, HostileRecord]


class Hostile(Fault):
    """Records on one topic, chosen by chance. They have happened once all sinks of the topic have read them, and have
    set each invalid one aside.
    """

    parts = ()
    needs: tuple[str, ...] = ("kafka",)
    has_id_of_event = False  # then its letter stays open: to discard it would give up the event

    def __init__(self) -> None:
        self._identities: set[str] = set()  # of the dead letters that its records have become

    def fire(self, testbed: Testbed, chance: random.Random) -> str:
        topic = self.topic(testbed, chance)
        sinks = testbed.readers(topic)
        if not sinks:
            raise NotFired(f"no sink reads topic {topic}")
        made = list(self.records(testbed, topic, chance))
        testbed.foreign += [record.event for record in made if record.event is not None]  # a check may see them at once
        delivered: dict[Place, HostileRecord] = {}
        try:
            send(testbed, topic, made, delivered)
        finally:
            self.foreign = _foreign(topic, delivered)
            self.invalid = sum(record.event is None for record in made)  # one that failed may be there too
        names = ", ".join(one.name for one in sinks)
        lacking: list[str] = []

        def set_aside() -> bool:
            with suppress(Failure, psycopg2.Error):  # the database may be broken
                if has_passed(testbed, sinks, topic, delivered):
                    lacking[:] = self._lacking(testbed, sinks, topic, delivered)
                    return True
            return False

        wait_or_not_fired(f"{names} to read the records", set_aside, timeout_s=LETTERS_TIMEOUT_S, poll_s=1)
        if lacking:
            raise NotFired(f"{len(lacking)} invalid records became no dead letter: {', '.join(lacking[:5])}")
        invalid = len(delivered) - len(self.foreign)
        return f"{topic}: {len(sinks)} sinks set {invalid} records aside, and read {len(self.foreign)} valid ones"

    def heal(self, testbed: Testbed) -> None:
        """Give up their letters, as an operator does who has found their producer."""
        if not self.has_id_of_event:
            commands.discard(testbed, sorted(self._identities))

    def topic(self, testbed: Testbed, chance: random.Random) -> str:
        """The topic to send to: of events, or of a captured table."""
        return chance.choice(sorted([*catalog.of_project(testbed.settings).topics, *captured_topics(testbed)]))

    def records(self, testbed: Testbed, topic: str, chance: random.Random) -> Iterator[HostileRecord]:
        """The records."""
        raise NotImplementedError

    def _lacking(self, testbed: Testbed, sinks: Sequence[SinkSpec], topic: str, delivered: Delivered) -> list[str]:
        """The invalid records of which a sink has no letter: at their place, or of an earlier record with their id."""
        by_place: dict[tuple[str, Place], str] = {}
        by_id: dict[tuple[str, str], str] = {}
        names = [one.name for one in sinks]
        for sink, identity, partition, offset, event_id in testbed.query(LETTERS, [topic, names], SinkRole.AUDITOR):
            by_place[sink, (partition, offset)] = identity
            if event_id is not None:
                by_id[sink, event_id] = identity
        found: list[str] = []
        for place, record in delivered.items():
            for sink in sinks:
                letter = by_place.get((sink.name, place))
                if letter is None and record.event is None:
                    letter = by_id.get((sink.name, record.event_id or ""))
                if letter is not None:
                    self._identities.add(letter)
                elif record.event is None and asks_for(testbed, sink, topic, record):
                    found.append(f"{topic}-{place[0]}@{place[1]} of {sink.name}")
        return found


class Forged(Hostile):
    """Records of which some are foreign events, if the domain knows any: then on their topic.

    Never on that of a captured table: a change has no id, and nothing tells a forged one from a real one.
    """

    def topic(self, testbed: Testbed, chance: random.Random) -> str:
        if testbed.forge is None:
            return chance.choice(sorted(catalog.of_project(testbed.settings).topics))
        schema = newest(testbed, testbed.forge(chance).event)
        return catalog.of_project(testbed.settings).aggregates[schema.aggregate].topic


def asks_for(testbed: Testbed, sink: SinkSpec, topic: str, record: HostileRecord) -> bool:
    """Whether a sink asks for the event that a record claims to be. It skips others without a look at them."""
    if topic in captured_topics(testbed):
        return True
    type_ = record.headers.get("eventType")
    events = [f"{one.name}.{(type_ or b'').decode()}" for one in catalog.of_project(testbed.settings).topics[topic]]
    return type_ is None or not sink.decoders[topic].wanted_names.isdisjoint(events)


def has_passed(testbed: Testbed, sinks: Sequence[SinkSpec], topic: str, places: Collection[Place]) -> bool:
    """Whether each sink has read these records."""
    names = [one.name for one in sinks]
    positions = testbed.query(POSITIONS, [topic, names], SinkRole.AUDITOR)
    read = {(sink, partition): next_offset for sink, partition, next_offset in positions}
    return all(read.get((sink, partition), 0) > offset for sink in names for partition, offset in places)


def send(testbed: Testbed, topic: str, made: Sequence[HostileRecord], delivered: dict[Place, HostileRecord]) -> None:
    """Send records, and add each that arrives. Raises NotFired if one does not."""
    producer = Producer({**client_config(testbed.settings), "message.max.bytes": 2_000_000, "enable.idempotence": True})
    failed: list[str] = []
    for record in made:

        def arrived(error: KafkaError | None, message: Message, record: HostileRecord = record) -> None:
            if error is not None:
                failed.append(str(error))
            else:
                delivered[message.partition() or 0, message.offset() or 0] = record

        producer.produce(
            topic,
            record.value,
            key=record.key,
            headers=list(record.headers.items()),
            partition=record.partition,
            on_delivery=arrived,
        )
    left = producer.flush(60)
    if left or failed or not made:
        raise NotFired(f"{left + len(failed)} of {len(made)} records did not reach {topic}: {failed[:1]}")


def _foreign(topic: str, delivered: Delivered) -> list[ForeignRecord]:
    return [
        ForeignRecord(topic, *place, record.event.key, record.event.totals)
        for place, record in delivered.items()
        if record.event is not None
    ]


class Foreign(Hostile):
    """Records of another program on our topics, without our headers."""

    name = "records-foreign"

    def records(self, testbed: Testbed, topic: str, chance: random.Random) -> Iterator[HostileRecord]:
        del testbed, topic
        for _ in range(RECORDS):
            yield HostileRecord(
                chance.randbytes(8), {}, chance.choice([b"hello", b"[]", b"", None, chance.randbytes(50)])
            )


class Malformed(Hostile):
    """Records with our headers, and a value that breaks the contract."""

    name = "records-malformed"

    def records(self, testbed: Testbed, topic: str, chance: random.Random) -> Iterator[HostileRecord]:
        for _ in range(RECORDS):
            if topic in captured_topics(testbed):
                yield HostileRecord(str(uuid.uuid4()).encode(), {}, broken_change(chance))
                continue
            headers, event = example(testbed, topic, chance)
            broken = dict(event)
            broken.pop(chance.choice(sorted(broken)))
            values = [json.dumps(broken), "{", "null", json.dumps(event)[:-5], '{"a": NaN}']
            yield HostileRecord(str(uuid.uuid4()).encode(), headers, chance.choice(values).encode())


class Huge(Hostile):
    """Records of almost a megabyte."""

    name = "records-huge"

    def records(self, testbed: Testbed, topic: str, chance: random.Random) -> Iterator[HostileRecord]:
        for _ in range(3):
            if topic in captured_topics(testbed):
                yield HostileRecord(b"huge", {}, json.dumps({**envelope(chance), "op": "x" * HUGE_BYTES}).encode())
                continue
            headers, event = example(testbed, topic, chance)
            yield HostileRecord(b"huge", headers, json.dumps({**event, "more": "x" * HUGE_BYTES}).encode())


class Decades(Forged):
    """Valid events with ids of ten years, and invalid ones with older ids and those of the future."""

    name = "records-of-decades"

    def records(self, testbed: Testbed, topic: str, chance: random.Random) -> Iterator[HostileRecord]:
        now_ms = round(time.time() * 1000)
        age_max_ms = testbed.settings.sink_id_age_max_days * DAY_MS
        for number in range(RECORDS):
            if number % 2 and testbed.forge is not None:
                event_id = uuid_v7(chance, now_ms + chance.randint(HOUR_MS - age_max_ms, DAY_MS // 2))
                yield forged(testbed, testbed.forge(chance), event_id)
            else:
                past = (0, now_ms - age_max_ms - HOUR_MS)
                future = (now_ms + 2 * DAY_MS, now_ms + DECADES_MS)
                headers, event = example(testbed, topic, chance)
                event_id = uuid_v7(chance, chance.randint(*chance.choice([past, future])))
                yield HostileRecord(b"decades", {**headers, "id": event_id.encode()}, json.dumps(event).encode())


class SameId(Forged):
    """Records with the id of a real event and other content, valid and invalid."""

    name = "records-with-used-ids"
    needs = ("kafka", "postgres")
    has_id_of_event = True

    def records(self, testbed: Testbed, topic: str, chance: random.Random) -> Iterator[HostileRecord]:
        """On the partition of the real event: if a sink reads everything again, that comes first again."""
        for number, (event_id, partition) in enumerate(self._used_ids(testbed, topic, chance)):
            if number % 2 and testbed.forge is not None:
                yield forged(testbed, testbed.forge(chance), event_id, partition)
            else:
                headers, event = example(testbed, topic, chance)
                value = json.dumps({**event, "version": -1}).encode()
                yield HostileRecord(b"used", {**headers, "id": event_id.encode()}, value)

    @staticmethod
    def _used_ids(testbed: Testbed, topic: str, chance: random.Random) -> list[tuple[str, int]]:
        """Ids of records at a random place of the topic, whether or not the outbox still has them, and where they are.

        Without those of hostile records.
        """
        within: dict[int, tuple[int, int]] = {}
        for partition, (first, last) in topics.watermarks(testbed.settings, topic).items():
            begin = chance.randint(first, max(first, last - 4 * RECORDS))
            within[partition] = (begin, min(last, begin + 4 * RECORDS))
        refused = {event_id for *_, event_id in testbed.query(LETTERS_OF_ALL, [topic], SinkRole.AUDITOR)}
        forged_keys = foreign.keys(testbed.foreign)
        found: list[tuple[str, int]] = []
        for message in records.read(testbed.settings, topic, within):
            event_id = dict(message.headers() or []).get("id")
            is_ours = (message.key() or b"").decode(errors="replace") not in forged_keys
            if is_ours and isinstance(event_id, bytes) and event_id.decode() not in refused:
                found.append((event_id.decode(), message.partition() or 0))
        return chance.sample(found, min(RECORDS, len(found)))


def newest(testbed: Testbed, event: str) -> EventSchema:
    """The newest version of an event."""
    aggregate, _, type_ = event.partition(".")
    return max(
        catalog.of_project(testbed.settings).aggregates[aggregate].events[type_].values(), key=lambda one: one.version
    )


def forged(testbed: Testbed, event: ForeignEvent, event_id: str, partition: int = ANY_PARTITION) -> HostileRecord:
    """The record of a foreign event, as the relay would write it."""
    headers = headers_of(newest(testbed, event.event), event_id)
    return HostileRecord(event.key.encode(), headers, json.dumps(event.payload).encode(), partition, event)


def example(testbed: Testbed, topic: str, chance: random.Random) -> tuple[Headers, dict[str, Any]]:
    """The headers of a valid event of a topic, and its payload: an example of its schema."""
    aggregates = catalog.of_project(testbed.settings).topics[topic]
    chosen = chance.choice([schema for aggregate in aggregates for schema in aggregate.schemas])
    return headers_of(chosen, uuid_v7(chance, 1_790_000_000_000)), dict(chosen.examples[0])


def headers_of(schema: EventSchema, event_id: str) -> Headers:
    """The headers of an event, as the relay would write them."""
    return {"id": event_id.encode(), "eventType": schema.type.encode(), "schemaVersion": str(schema.version).encode()}


def captured_topics(testbed: Testbed) -> set[str]:
    """The topics of captured tables that a sink reads."""
    return {connector.topic for connector in testbed.captures}


def envelope(chance: random.Random) -> dict[str, Any]:
    """A change of no row, as Debezium would write it: no sink can say what it has changed."""
    return {"before": None, "after": {}, "source": {"table": "nothing", "lsn": chance.getrandbits(62)}, "op": "u"}


def broken_change(chance: random.Random) -> bytes:
    """The value of a record that is no change of a row."""
    broken = envelope(chance)
    whole = json.dumps(broken)
    broken.pop(chance.choice(["after", "source", "op"]))
    return chance.choice([whole, json.dumps(broken), whole[:-5], "{", "null", '{"a": NaN}']).encode()


def uuid_v7(chance: random.Random, time_ms: int) -> str:
    """A UUIDv7 of a time, in milliseconds since 1970."""
    number = time_ms << 80 | chance.getrandbits(80)
    number = number & ~(0xF << 76) | 0x7 << 76
    return str(uuid.UUID(int=number & ~(0x3 << 62) | 0x2 << 62))


FAULTS: list[Make] = [Foreign, Malformed, Huge, Decades, SameId]
