"""Hostile records on the topics, by a producer that is not the relay. None is a valid event: its key is another one."""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from confluent_kafka import Producer

from outbox.events import catalog
from outbox.kafka.clients import client_config
from outbox.soak.fault import Fault, NotFired
from outbox.soak.testbed import Testbed

RECORDS = 20
HUGE_BYTES = 900_000
DAY_MS = 86_400_000
DECADES_MS = 365 * DAY_MS * 30
Headers = Mapping[str, bytes | None]
Made = tuple[bytes | None, Headers, bytes | None]


class Hostile(Fault):
    """Records of one kind on one topic, chosen by chance."""

    parts = ("kafka",)
    lasts_s = (0.0, 0.0)

    def fire(self, testbed: Testbed, chance: random.Random) -> str:
        settings = testbed.settings
        topic = chance.choice(sorted(catalog.of(settings).topics))
        producer = Producer({**client_config(settings), "message.max.bytes": 2_000_000, "enable.idempotence": True})
        failed: list[str] = []
        count = 0
        for key, headers, value in self.records(testbed, topic, chance):
            producer.produce(
                topic,
                value,
                key=key,
                headers=list(headers.items()),
                on_delivery=lambda error, _: failed.append(str(error)) if error else None,
            )
            count += 1
        left = producer.flush(60)
        if left or failed or not count:
            raise NotFired(f"{left + len(failed)} of {count} records did not reach {topic}: {failed[:1]}")
        return f"{count} records on {topic}"

    def records(self, testbed: Testbed, topic: str, chance: random.Random) -> Iterator[Made]:
        """Key, headers and value of each."""
        raise NotImplementedError


class Foreign(Hostile):
    """Records of another program on our topics, without our headers."""

    name = "records-foreign"

    def records(self, testbed: Testbed, topic: str, chance: random.Random) -> Iterator[Made]:
        del testbed, topic
        for _ in range(RECORDS):
            yield chance.randbytes(8), {}, chance.choice([b"hello", b"[]", b"", None, chance.randbytes(50)])


class Malformed(Hostile):
    """Records with our headers, and a value that breaks the contract."""

    name = "records-malformed"

    def records(self, testbed: Testbed, topic: str, chance: random.Random) -> Iterator[Made]:
        for _ in range(RECORDS):
            headers, event = example(testbed, topic, chance)
            broken = dict(event)
            broken.pop(chance.choice(sorted(broken)))
            values = [json.dumps(broken), "{", "null", json.dumps(event)[:-5], '{"a": NaN}']
            yield str(uuid.uuid4()).encode(), headers, chance.choice(values).encode()


class Huge(Hostile):
    """Records of almost a megabyte."""

    name = "records-huge"

    def records(self, testbed: Testbed, topic: str, chance: random.Random) -> Iterator[Made]:
        for _ in range(3):
            headers, event = example(testbed, topic, chance)
            yield b"huge", headers, json.dumps({**event, "more": "x" * HUGE_BYTES}).encode()


class Decades(Hostile):
    """Invalid events with ids of the last decades, and of the next."""

    name = "records-of-decades"

    def records(self, testbed: Testbed, topic: str, chance: random.Random) -> Iterator[Made]:
        for _ in range(RECORDS):
            headers, event = example(testbed, topic, chance)
            event_id = uuid_v7(chance, round(chance.uniform(0, 2 * DECADES_MS)))
            yield b"decades", {**headers, "id": event_id.encode()}, json.dumps({**event, "version": 0}).encode()


class SameId(Hostile):
    """Records with the id of a real event, and other, invalid content."""

    name = "records-with-used-ids"

    def records(self, testbed: Testbed, topic: str, chance: random.Random) -> Iterator[Made]:
        used = testbed.query("SELECT id::text FROM outbox ORDER BY random() LIMIT %s", [RECORDS])
        for (event_id,) in used:
            headers, event = example(testbed, topic, chance)
            yield b"used", {**headers, "id": event_id.encode()}, json.dumps({**event, "version": -1}).encode()


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
