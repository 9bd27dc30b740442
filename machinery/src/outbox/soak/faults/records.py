"""Hostile records on the topics, by a producer that is not the relay. None is a valid event: its key is another one."""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import psycopg2
from confluent_kafka import KafkaError, Message, Producer

from outbox.base.errors import Failure
from outbox.base.settings import SinkRole
from outbox.events import catalog
from outbox.kafka import records as kafka_records
from outbox.kafka import topics
from outbox.kafka.clients import client_config
from outbox.sink import spec
from outbox.soak.fault import Fault, NotFired, wait_or_not_fired
from outbox.soak.faults import commands
from outbox.soak.testbed import Testbed

RECORDS = 20
HUGE_BYTES = 900_000
DAY_MS = 86_400_000
DECADES_MS = 365 * DAY_MS * 30
Headers = Mapping[str, bytes | None]
Place = tuple[int, int]  # partition and offset
Places = Mapping[Place, str | None]  # with the id that the record claims
LETTERS_TIMEOUT_S = 300.0  # sinks may be down, or begin again
LETTERS_OF_ALL = "SELECT event_id::text FROM dead_letters WHERE topic = %s"
LETTERS = 'SELECT identity, partition, "offset", event_id::text FROM dead_letters WHERE topic = %s AND sink = ANY(%s)'
POSITIONS = "SELECT sink, partition, next_offset FROM positions WHERE topic = %s AND sink = ANY(%s)"


class Record(NamedTuple):
    """A record for a topic."""

    key: bytes | None
    headers: Headers
    value: bytes | None


class Hostile(Fault):
    """Records of one kind on one topic, chosen by chance. They have happened once sinks have set each of them aside."""

    parts = ()
    needs = ("kafka",)
    lasts_s = (0.0, 0.0)
    has_id_of_event = False  # then its letter stays open: to discard it would give up the event

    def __init__(self) -> None:
        self._identities: set[str] = set()  # of the letters

    def fire(self, testbed: Testbed, chance: random.Random) -> str:
        topic = chance.choice(sorted(catalog.of(testbed.settings).topics))
        sinks = [name for name in testbed.sink_names if topic in spec.sinks(testbed.settings)[name].topics]
        if not sinks:
            raise NotFired(f"no sink reads topic {topic}")
        places = send(testbed, topic, list(self.records(testbed, topic, chance)))

        def set_aside() -> bool:
            with suppress(Failure, psycopg2.Error):  # the database may be broken
                return has_passed(testbed, sinks, topic, places) and self._has_letters(testbed, sinks, topic, places)
            return False

        wait_or_not_fired(
            f"{', '.join(sinks)} to set the records aside", set_aside, timeout_s=LETTERS_TIMEOUT_S, poll_s=1
        )
        return f"{len(places)} records on {topic}, read by {len(sinks)} sinks and set aside"

    def heal(self, testbed: Testbed) -> None:
        """Give up their letters, so that `outbox check` finds no problem and stores how far it has come."""
        if not self.has_id_of_event:
            commands.discard(testbed, sorted(self._identities))

    def records(self, testbed: Testbed, topic: str, chance: random.Random) -> Iterator[Record]:
        """The records."""
        raise NotImplementedError

    def _has_letters(self, testbed: Testbed, sinks: Sequence[str], topic: str, places: Places) -> bool:
        """Whether there is a letter of each record: at its place, or of an earlier record with its id.

        A sink has none of an event that it does not ask for.
        """
        by_place: dict[Place, str] = {}
        by_id: dict[str | None, str] = {}
        for identity, partition, offset, event_id in testbed.query(LETTERS, [topic, list(sinks)], SinkRole.AUDITOR):
            by_place[partition, offset] = identity
            if event_id is not None:
                by_id[event_id] = identity
        letters = [by_place.get(place) or by_id.get(event_id) for place, event_id in places.items()]
        self._identities |= {letter for letter in letters if letter is not None}
        return None not in letters


def has_passed(testbed: Testbed, sinks: Sequence[str], topic: str, places: Places) -> bool:
    """Whether each sink has read these records."""
    positions = testbed.query(POSITIONS, [topic, list(sinks)], SinkRole.AUDITOR)
    read = {(sink, partition): next_offset for sink, partition, next_offset in positions}
    return all(read.get((sink, partition), 0) > offset for sink in sinks for partition, offset in places)


def send(testbed: Testbed, topic: str, made: Sequence[Record]) -> Places:
    """Send records. Returns the id that each claims, by its place. Raises NotFired if one does not arrive."""
    producer = Producer({**client_config(testbed.settings), "message.max.bytes": 2_000_000, "enable.idempotence": True})
    failed: list[str] = []
    places: dict[Place, str | None] = {}
    for record in made:
        claimed = record.headers.get("id")
        event_id = None if claimed is None else claimed.decode()

        def delivered(error: KafkaError | None, message: Message, event_id: str | None = event_id) -> None:
            if error is not None:
                failed.append(str(error))
            else:
                places[message.partition() or 0, message.offset() or 0] = event_id

        producer.produce(
            topic, record.value, key=record.key, headers=list(record.headers.items()), on_delivery=delivered
        )
    left = producer.flush(60)
    if left or failed or not made:
        raise NotFired(f"{left + len(failed)} of {len(made)} records did not reach {topic}: {failed[:1]}")
    return places


class Foreign(Hostile):
    """Records of another program on our topics, without our headers."""

    name = "records-foreign"

    def records(self, testbed: Testbed, topic: str, chance: random.Random) -> Iterator[Record]:
        del testbed, topic
        for _ in range(RECORDS):
            yield Record(chance.randbytes(8), {}, chance.choice([b"hello", b"[]", b"", None, chance.randbytes(50)]))


class Malformed(Hostile):
    """Records with our headers, and a value that breaks the contract."""

    name = "records-malformed"

    def records(self, testbed: Testbed, topic: str, chance: random.Random) -> Iterator[Record]:
        for _ in range(RECORDS):
            headers, event = example(testbed, topic, chance)
            broken = dict(event)
            broken.pop(chance.choice(sorted(broken)))
            values = [json.dumps(broken), "{", "null", json.dumps(event)[:-5], '{"a": NaN}']
            yield Record(str(uuid.uuid4()).encode(), headers, chance.choice(values).encode())


class Huge(Hostile):
    """Records of almost a megabyte."""

    name = "records-huge"

    def records(self, testbed: Testbed, topic: str, chance: random.Random) -> Iterator[Record]:
        for _ in range(3):
            headers, event = example(testbed, topic, chance)
            yield Record(b"huge", headers, json.dumps({**event, "more": "x" * HUGE_BYTES}).encode())


class Decades(Hostile):
    """Invalid events with ids of the last decades, and of the next."""

    name = "records-of-decades"

    def records(self, testbed: Testbed, topic: str, chance: random.Random) -> Iterator[Record]:
        for _ in range(RECORDS):
            headers, event = example(testbed, topic, chance)
            event_id = uuid_v7(chance, round(chance.uniform(0, 2 * DECADES_MS)))
            yield Record(b"decades", {**headers, "id": event_id.encode()}, json.dumps({**event, "version": 0}).encode())


class SameId(Hostile):
    """Records with the id of a real event, and other, invalid content."""

    name = "records-with-used-ids"
    has_id_of_event = True

    def records(self, testbed: Testbed, topic: str, chance: random.Random) -> Iterator[Record]:
        for event_id in self._used_ids(testbed, topic, chance):
            headers, event = example(testbed, topic, chance)
            yield Record(b"used", {**headers, "id": event_id.encode()}, json.dumps({**event, "version": -1}).encode())

    @staticmethod
    def _used_ids(testbed: Testbed, topic: str, chance: random.Random) -> list[str]:
        """Ids of records at a random place of the topic, whether or not the outbox still has them."""
        within: dict[int, tuple[int, int]] = {}
        for partition, (first, last) in topics.watermarks(testbed.settings, topic).items():
            begin = chance.randint(first, max(first, last - 4 * RECORDS))
            within[partition] = (begin, min(last, begin + 4 * RECORDS))
        refused = {event_id for *_, event_id in testbed.query(LETTERS_OF_ALL, [topic], SinkRole.AUDITOR)}
        found: list[str] = []
        for message in kafka_records.read(testbed.settings, topic, within):
            event_id = dict(message.headers() or []).get("id")
            if isinstance(event_id, bytes) and event_id.decode() not in refused:
                found.append(event_id.decode())
        return chance.sample(found, min(RECORDS, len(found)))


def example(testbed: Testbed, topic: str, chance: random.Random) -> tuple[Headers, dict[str, Any]]:
    """The headers of a valid event of a topic, and its payload: an example of its schema."""
    aggregates = catalog.of(testbed.settings).topics[topic]
    chosen = chance.choice([schema for aggregate in aggregates for schema in aggregate.schemas])
    headers = {
        "id": uuid_v7(chance, 1_790_000_000_000).encode(),
        "eventType": chosen.type.encode(),
        "schemaVersion": str(chosen.version).encode(),
    }
    return headers, dict(chosen.examples[0])


def uuid_v7(chance: random.Random, time_ms: int) -> str:
    """A UUIDv7 of a time, in milliseconds since 1970."""
    number = time_ms << 80 | chance.getrandbits(80)
    number = number & ~(0xF << 76) | 0x7 << 76
    return str(uuid.UUID(int=number & ~(0x3 << 62) | 0x2 << 62))


FAULTS: list[Callable[[], Fault]] = [Foreign, Malformed, Huge, Decades, SameId]
