"""Hostile records on the topics, by a producer that is not the relay.

An invalid one becomes a dead letter of every sink that asks for such events. A valid one is a foreign event
(`outbox_lab.soak.domain.ForeignEvent`), which the checkers know by its position.
"""

from __future__ import annotations

import json
import random
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from confluent_kafka import KafkaError, Message, Producer

from outbox.base.settings import SinkRole
from outbox.events import catalog
from outbox.events.schema import EventSchema
from outbox.kafka import records, topics
from outbox.kafka.clients import client_config
from outbox.sink.spec import SinkSpec
from outbox_lab.soak.domain import ForeignEvent, foreign_keys
from outbox_lab.soak.fault import NotFired, Strike, despite_faults, wait_or_not_fired
from outbox_lab.soak.faults.operations import Place, discard, has_passed
from outbox_lab.soak.seen import ForeignRecord
from outbox_lab.soak.testbed import Testbed

RECORDS = 20
HUGE_BYTES = 900_000
HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
DECADES_MS = 365 * DAY_MS * 30
ANY_PARTITION = -1  # that of the key
Headers = Mapping[str, bytes | None]
LETTERS_TIMEOUT_S = 300.0  # sinks may be down, or begin again
LETTERS_OF_ALL = "SELECT event_id::text FROM public.dead_letters WHERE topic = %s"
LETTERS = """
SELECT sink, identity, partition, "offset", event_id::text FROM public.dead_letters WHERE topic = %s AND sink = ANY(%s)
"""


class HostileRecord(NamedTuple):
    """A record for a topic."""

    key: bytes | None
    headers: Headers
    value: bytes | None
    partition: int = ANY_PARTITION
    event: ForeignEvent | None = None  # if it is valid


Delivered = Mapping[Place, HostileRecord]
Make = Callable[[Testbed, str, random.Random], Iterator[HostileRecord]]  # records for a topic

Choose = Callable[[Testbed, random.Random], str]  # a topic


def discard_letters(strike: Strike) -> None:
    """Give up their letters, as an operator does who has found their producer."""
    discard(strike.testbed, sorted(strike.letters))


def any_topic(testbed: Testbed, chance: random.Random) -> str:
    """A topic of events, or of a captured table."""
    return chance.choice(sorted([*catalog.of_project(testbed.settings).topics, *captured_topics(testbed)]))


def topic_of_events(testbed: Testbed, chance: random.Random) -> str:
    """The topic of foreign events, if the domain knows any.

    Never that of a captured table: a change has no id, and nothing tells a forged one from a real one.
    """
    known = catalog.of_project(testbed.settings)
    if testbed.options.foreign_event is None:
        return chance.choice(sorted(known.topics))
    return known.aggregates[_newest(testbed, testbed.options.foreign_event(chance).event).aggregate].topic


def captured_topics(testbed: Testbed) -> set[str]:
    """The topics of captured tables that a sink reads."""
    return {connector.topic for connector in testbed.captures}


def send(strike: Strike, make: Make, choose: Choose = any_topic) -> str:
    """Send records to a topic. It has happened once all sinks have read them, and have set each invalid one aside."""
    testbed = strike.testbed
    topic = choose(testbed, strike.chance)
    sinks = testbed.readers(topic)
    if not sinks:
        raise NotFired(f"no sink reads topic {topic}")
    made = list(make(testbed, topic, strike.chance))
    testbed.foreign += [record.event for record in made if record.event is not None]  # a check may see them at once
    delivered: dict[Place, HostileRecord] = {}
    try:
        _produce(testbed, topic, made, delivered)
    finally:
        strike.foreign = [
            ForeignRecord(topic, *place, record.event.key, record.event.totals)
            for place, record in delivered.items()
            if record.event is not None
        ]
        strike.invalid = sum(record.event is None for record in made)  # one that failed may be there too
    names = [one.name for one in sinks]

    def read() -> list[list[str]]:
        return (
            [_without_letter(strike, sinks, topic, delivered)] if has_passed(testbed, names, topic, delivered) else []
        )

    what = f"{', '.join(names)} to read the records"
    [lacking] = wait_or_not_fired(what, despite_faults(read), timeout_s=LETTERS_TIMEOUT_S, poll_s=1)
    if lacking:
        raise NotFired(f"{len(lacking)} invalid records became no dead letter: {', '.join(lacking[:5])}")
    invalid = len(delivered) - len(strike.foreign)
    return f"{topic}: {len(sinks)} sinks set {invalid} records aside, and read {len(strike.foreign)} valid ones"


def _produce(
    testbed: Testbed, topic: str, made: Sequence[HostileRecord], delivered: dict[Place, HostileRecord]
) -> None:
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


def _without_letter(strike: Strike, sinks: Sequence[SinkSpec], topic: str, delivered: Delivered) -> list[str]:
    """The invalid records of which a sink has no letter: at their place, or of an earlier record with their id."""
    by_place: dict[tuple[str, Place], str] = {}
    by_id: dict[tuple[str, bytes | None], str] = {}
    rows = strike.testbed.query(LETTERS, [topic, [one.name for one in sinks]], SinkRole.AUDITOR)
    for sink, identity, partition, offset, event_id in rows:
        by_place[sink, (partition, offset)] = identity
        if event_id is not None:
            by_id[sink, event_id.encode()] = identity
    found: list[str] = []
    for place, record in delivered.items():
        for spec in sinks:
            letter = by_place.get((spec.name, place))
            if letter is None and record.event is None:
                letter = by_id.get((spec.name, record.headers.get("id")))
            if letter is not None:
                strike.letters.add(letter)
            elif record.event is None and asks_for(strike.testbed, spec, topic, record):
                found.append(f"{topic}-{place[0]}@{place[1]} of {spec.name}")
    return found


def asks_for(testbed: Testbed, sink: SinkSpec, topic: str, record: HostileRecord) -> bool:
    """Whether a sink asks for the event that a record claims to be. It skips others without a look at them."""
    if topic in captured_topics(testbed):
        return True
    type_ = record.headers.get("eventType")
    events = [f"{one.name}.{(type_ or b'').decode()}" for one in catalog.of_project(testbed.settings).topics[topic]]
    return type_ is None or not sink.decoders[topic].wanted_names.isdisjoint(events)


# Make them ---------------------------------------------------------------------------------------------------------


def foreign_records(_: Testbed, _topic: str, chance: random.Random) -> Iterator[HostileRecord]:
    """Records without our headers."""
    for _number in range(RECORDS):
        value = chance.choice([b"hello", b"[]", b"", None, chance.randbytes(50)])
        yield HostileRecord(chance.randbytes(8), {}, value)


def malformed_records(testbed: Testbed, topic: str, chance: random.Random) -> Iterator[HostileRecord]:
    """Records with our headers, whose values break the contract."""
    is_captured = topic in captured_topics(testbed)
    for _ in range(RECORDS):
        headers, event = ({}, _envelope(chance)) if is_captured else _example(testbed, topic, chance)
        whole, needed = json.dumps(event), {"after", "source", "op"} if is_captured else event
        event.pop(chance.choice(sorted(needed)))
        # A change of no row is wrong as a whole, too.
        values = [json.dumps(event), whole[:-5], "{", "null", '{"a": NaN}', *([whole] if is_captured else [])]
        yield HostileRecord(str(uuid.uuid4()).encode(), headers, chance.choice(values).encode())


def huge_records(testbed: Testbed, topic: str, chance: random.Random) -> Iterator[HostileRecord]:
    """Records of almost a megabyte."""
    is_captured = topic in captured_topics(testbed)
    for _ in range(3):
        headers, event = ({}, _envelope(chance)) if is_captured else _example(testbed, topic, chance)
        name = "op" if is_captured else "more"
        yield HostileRecord(b"huge", headers, json.dumps({**event, name: "x" * HUGE_BYTES}).encode())


def records_of_decades(testbed: Testbed, topic: str, chance: random.Random) -> Iterator[HostileRecord]:
    """Valid events with ids of ten years, and invalid ones with older ids and those of the future."""
    now_ms = round(time.time() * 1000)
    age_max_ms = testbed.settings.sink_id_age_max_days * DAY_MS
    for number in range(RECORDS):
        if number % 2 and testbed.options.foreign_event is not None:
            event_id = _uuid_v7(chance, now_ms + chance.randint(HOUR_MS - age_max_ms, DAY_MS // 2))
            yield _forged(testbed, testbed.options.foreign_event(chance), event_id)
        else:
            past = (0, now_ms - age_max_ms - HOUR_MS)
            future = (now_ms + 2 * DAY_MS, now_ms + DECADES_MS)
            headers, event = _example(testbed, topic, chance)
            event_id = _uuid_v7(chance, chance.randint(*chance.choice([past, future])))
            yield HostileRecord(b"decades", {**headers, "id": event_id.encode()}, json.dumps(event).encode())


def records_with_used_ids(testbed: Testbed, topic: str, chance: random.Random) -> Iterator[HostileRecord]:
    """On the partition of the real event: if a sink reads everything again, that comes first again."""
    for number, (event_id, partition) in enumerate(_used_ids(testbed, topic, chance)):
        if number % 2 and testbed.options.foreign_event is not None:
            yield _forged(testbed, testbed.options.foreign_event(chance), event_id, partition)
        else:
            headers, event = _example(testbed, topic, chance)
            value = json.dumps({**event, "version": -1}).encode()
            yield HostileRecord(b"used", {**headers, "id": event_id.encode()}, value)


def _used_ids(testbed: Testbed, topic: str, chance: random.Random) -> list[tuple[str, int]]:
    """Ids of records at a random place of the topic, whether or not the outbox still has them, and their partitions.

    Without those of hostile records.
    """
    within: dict[int, tuple[int, int]] = {}
    for partition, (first, last) in topics.watermarks(testbed.settings, topic).items():
        begin = chance.randint(first, max(first, last - 4 * RECORDS))
        within[partition] = (begin, min(last, begin + 4 * RECORDS))
    refused = {event_id for (event_id,) in testbed.query(LETTERS_OF_ALL, [topic], SinkRole.AUDITOR)}
    forged_keys = foreign_keys(testbed.foreign)
    found: list[tuple[str, int]] = []
    for message in records.read(testbed.settings, topic, within):
        event_id = dict(message.headers() or []).get("id")
        is_ours = (message.key() or b"").decode(errors="replace") not in forged_keys
        if is_ours and isinstance(event_id, bytes) and event_id.decode() not in refused:
            found.append((event_id.decode(), message.partition() or 0))
    return chance.sample(found, min(RECORDS, len(found)))


def _newest(testbed: Testbed, event: str) -> EventSchema:
    """The newest version of an event."""
    aggregate, _, type_ = event.partition(".")
    versions = catalog.of_project(testbed.settings).aggregates[aggregate].events[type_]
    return max(versions.values(), key=lambda one: one.version)


def _forged(testbed: Testbed, event: ForeignEvent, event_id: str, partition: int = ANY_PARTITION) -> HostileRecord:
    """The record of a foreign event, as the relay would write it."""
    headers = _headers(_newest(testbed, event.event), event_id)
    return HostileRecord(event.key.encode(), headers, json.dumps(event.payload).encode(), partition, event)


def _example(testbed: Testbed, topic: str, chance: random.Random) -> tuple[Headers, dict[str, Any]]:
    """The headers of a valid event of a topic, and its payload: an example of its schema."""
    aggregates = catalog.of_project(testbed.settings).topics[topic]
    chosen = chance.choice([schema for aggregate in aggregates for schema in aggregate.schemas])
    return _headers(chosen, _uuid_v7(chance, 1_790_000_000_000)), dict(chosen.examples[0])


def _headers(schema: EventSchema, event_id: str) -> Headers:
    """The headers of an event, as the relay would write them."""
    return {"id": event_id.encode(), "eventType": schema.type.encode(), "schemaVersion": str(schema.version).encode()}


def _envelope(chance: random.Random) -> dict[str, Any]:
    """A change of no row, as Debezium would write it: no sink can say what it has changed."""
    return {"before": None, "after": {}, "source": {"table": "nothing", "lsn": chance.getrandbits(62)}, "op": "u"}


def _uuid_v7(chance: random.Random, time_ms: int) -> str:
    """A UUIDv7 of a time, in milliseconds since 1970."""
    number = time_ms << 80 | chance.getrandbits(80)
    number = number & ~(0xF << 76) | 0x7 << 76
    return str(uuid.UUID(int=number & ~(0x3 << 62) | 0x2 << 62))
