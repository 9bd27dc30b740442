"""Read a part of a topic: its valid events, and the records that break the contract."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import repeat
from typing import NamedTuple

import pyarrow as pa

from outbox.audit.buckets import Packed
from outbox.audit.comparison_files import NUMBERS
from outbox.audit.declared import EventTopic
from outbox.audit.quantity import Quantity
from outbox.base.settings import Settings
from outbox.events.schema import SqlType
from outbox.kafka import records
from outbox.kafka.records import Within
from outbox.sink.decoding.dead_records import identity
from outbox.sink.decoding.records import DeadRecord, Records, Rows

PART_MAX_BYTES = 16 * 2**20  # of packed rows; more only if one answer of the brokers has more
EVENT_ID_BYTES = 16  # the identity of a record without an event id is longer: a hash


class TopicOffset(NamedTuple):
    """The place of a record."""

    partition: int
    offset: int

    def __str__(self) -> str:
        return f"partition {self.partition}, offset {self.offset}"


class Delivered(NamedTuple):
    """An event at a place on a topic. There may be many, so it is flat."""

    topic: int
    kind: int
    key: str
    version: int | None
    numbers: tuple[Quantity, ...]  # of the topic's properties
    partition: int
    offset: int

    @property
    def place(self) -> TopicOffset:
        """Where it is."""
        return TopicOffset(self.partition, self.offset)


class Refused(NamedTuple):
    """A record that breaks the contract."""

    topic: int
    key: str
    partition: int
    offset: int
    reason: str
    detail: str

    @property
    def place(self) -> TopicOffset:
        """Where it is."""
        return TopicOffset(self.partition, self.offset)


class TopicPart(NamedTuple):
    """What was read of a topic: rows of `Delivered` and of `Refused`, as `Packed.take` returns them.

    Events are by their id. Refused records are by the identity of their dead letters.
    """

    topic: int
    records: int
    delivered: Sequence[bytes]
    refused: Sequence[bytes]
    rest: Within | None = None  # what was not read


@dataclass(frozen=True)
class PartReader:
    """Reads parts of the declared topics. Other processes can run it."""

    topics: Sequence[EventTopic]
    salt: bytes  # of the packed rows

    def read(self, settings: Settings, topic: int, within: Within) -> TopicPart:
        """The committed records within these offsets of the topic with this number, or the first of them, as many as
        fit into memory.

        Raises Failure if Kafka is unavailable.
        """
        part, rest = _Part(self.topics[topic], self.salt), dict(within)
        for messages in records.batches(settings, self.topics[topic].name, within):
            part.add(Records.of_messages(messages))
            for message in messages:
                partition = message.partition() or 0
                rest[partition] = ((message.offset() or 0) + 1, rest[partition][1])
            if part.bytes > PART_MAX_BYTES:
                return part.result(rest)
        return part.result()

    def part(self, topic: int, read: Records) -> TopicPart:
        """Records that were read already."""
        part = _Part(self.topics[topic], self.salt)
        part.add(read)
        return part.result()


class _Part:
    def __init__(self, topic: EventTopic, salt: bytes) -> None:
        self._topic = topic
        self._records = 0
        self._delivered, self._refused = Packed(Delivered, salt), Packed(Refused, salt)

    @property
    def bytes(self) -> int:
        return self._delivered.bytes + self._refused.bytes

    def add(self, read: Records) -> None:
        self._records += len(read)
        decoded = self._topic.decoder.decode(read)
        for event_id, event in _all_events(self._topic, decoded.rows):
            self._delivered.add(identity_bytes(event_id), event)
        for one in decoded.dead:
            self._refused.add(identity_bytes(identity(one.record, one.event_id)), _refused(self._topic, one))

    def result(self, rest: Within | None = None) -> TopicPart:
        return TopicPart(self._topic.number, self._records, self._delivered.take(), self._refused.take(), rest)


def decoded_events(topic: EventTopic, read: Records) -> Iterator[tuple[str, Delivered]]:
    """The events among records of a topic, each with its id."""
    return _all_events(topic, topic.decoder.decode(read).rows)


def _all_events(topic: EventTopic, rows: Rows) -> Iterator[tuple[str, Delivered]]:
    for name, table in rows.items():
        yield from _events(topic, name, table)


def _events(topic: EventTopic, name: str, rows: pa.Table) -> Iterator[tuple[str, Delivered]]:
    """The events of the rows of a kind, each with its id."""
    count, decoder, kind = rows.num_rows, topic.decoder, topic.kinds[name]
    versions = repeat(None, count) if decoder.version is None else rows[decoder.version].to_pylist()
    numeric = {column.name: column.type for column in decoder.types[name] if column.type in NUMBERS}
    numbers = [_numbers(rows, one, numeric.get(one)) for one in topic.properties]
    of_events = zip(*numbers, strict=True) if numbers else repeat((), count)
    columns = (rows[one].to_pylist() for one in ("event_id", decoder.key, "partition", "offset"))
    for event_id, key, partition, offset, version, of_event in zip(*columns, versions, of_events, strict=True):
        yield event_id, Delivered(topic.number, kind, str(key), version, of_event, partition, offset)


def _numbers(rows: pa.Table, name: str, type_: SqlType | None) -> Sequence[Quantity]:
    """The values of a property; 0 where an event has none."""
    if type_ is None:
        return [0] * rows.num_rows
    values = rows[name].to_pylist()
    return [value or 0 for value in values] if type_ == "bigint" else [Decimal(value or 0) for value in values]


def _refused(topic: EventTopic, one: DeadRecord) -> Refused:
    key = (one.record.key or b"").decode(errors="replace")
    return Refused(topic.number, key, one.partition, one.offset, *one.rejection)


def identity_bytes(identity: str) -> bytes:
    """The identity of a dead letter, which mostly is an event's id, in fewer bytes."""
    return bytes.fromhex(identity.removeprefix("sha256:").replace("-", ""))
