"""Read a part of the topic: its valid events, and the records that break the contract."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Context, Decimal
from itertools import repeat
from typing import NamedTuple

import pyarrow as pa

from outbox.audit.buckets import Packed
from outbox.base.settings import Settings
from outbox.kafka import records
from outbox.kafka.records import Within
from outbox.sink.batch import DeadRecord
from outbox.sink.records import RecordDecoder, Records

PART_MAX_BYTES = 16 * 2**20  # of packed rows; more only if one answer of the brokers has more

# Sums of quantities are exact: the default context rounds to 28 digits.
EXACT = Context(prec=1000)
Quantity = int | Decimal


class TopicOffset(NamedTuple):
    """The place of a record."""

    partition: int
    offset: int

    def __str__(self) -> str:
        return f"partition {self.partition}, offset {self.offset}"


class Delivered(NamedTuple):
    """An event at a place on the topic. There may be many, so it is flat."""

    key: str
    version: int | None
    quantity: Quantity  # 0 if the events have none
    partition: int
    offset: int

    @property
    def place(self) -> TopicOffset:
        """Where it is."""
        return TopicOffset(self.partition, self.offset)


class Refused(NamedTuple):
    """A record with an event id that breaks the contract."""

    key: str
    place: TopicOffset


@dataclass
class Malformed:
    """The records that break the contract. Sinks set them aside; they count in no comparison."""

    count: int = 0
    first: str = ""  # place and reason
    reasons: Counter[str] = field(default_factory=Counter)

    def add(self, one: DeadRecord) -> None:
        """Count a record."""
        self.count += 1
        self.first = self.first or f"{TopicOffset(one.partition, one.offset)}: {one.rejection.detail}"
        self.reasons[one.rejection.reason] += 1

    def add_all(self, others: Malformed) -> None:
        """Count records that come after these."""
        self.count += others.count
        self.first = self.first or others.first
        self.reasons += others.reasons


class TopicPart(NamedTuple):
    """What was read: rows of `Delivered` and of `Refused`, as `Packed.take` returns them."""

    records: int
    malformed: Malformed
    delivered: Sequence[bytes]
    refused: Sequence[bytes]
    rest: Within | None = None  # what was not read


@dataclass(frozen=True)
class PartReader:
    """Reads parts of a topic whose records a decoder knows. Other processes can run it."""

    decoder: RecordDecoder
    salt: bytes  # of the packed rows

    def read(self, settings: Settings, within: Within) -> TopicPart:
        """The committed records within these offsets of the topic, or the first of them, as many as fit into memory.

        Raises Failure if Kafka is unavailable.
        """
        part, rest = _Part(self), dict(within)
        for messages in records.batches(settings, settings.topic, within):
            part.add(Records.of(messages))
            for message in messages:
                partition = message.partition() or 0
                rest[partition] = ((message.offset() or 0) + 1, rest[partition][1])
            if part.bytes > PART_MAX_BYTES:
                return part.result(rest)
        return part.result()

    def part(self, read: Records) -> TopicPart:
        """Records that were read already."""
        part = _Part(self)
        part.add(read)
        return part.result()


class _Part:
    def __init__(self, reader: PartReader) -> None:
        self._decoder = reader.decoder
        self._records = 0
        self._malformed = Malformed()
        self._delivered, self._refused = Packed(Delivered, reader.salt), Packed(Refused, reader.salt)

    @property
    def bytes(self) -> int:
        return self._delivered.bytes + self._refused.bytes

    def add(self, read: Records) -> None:
        self._records += len(read)
        decoded = self._decoder.decode(read)
        for event_id, event in _events(decoded.rows, self._decoder):
            self._delivered.add(_bytes(event_id), event)
        for one in decoded.dead:
            self._malformed.add(one)
            if one.event_id is not None:
                key = (one.record.key or b"").decode(errors="replace")
                self._refused.add(_bytes(one.event_id), Refused(key, TopicOffset(one.partition, one.offset)))

    def result(self, rest: Within | None = None) -> TopicPart:
        return TopicPart(self._records, self._malformed, self._delivered.take(), self._refused.take(), rest)


def _events(rows: pa.Table, decoder: RecordDecoder) -> Iterator[tuple[str, Delivered]]:
    """The events of a decoder's rows, each with its id."""

    def column(name: str | None) -> Iterable[object]:
        return repeat(None, rows.num_rows) if name is None else rows[name].to_pylist()

    values = (column(name) for name in (decoder.key, decoder.version, decoder.quantity, "partition", "offset"))
    for event_id, key, version, quantity, partition, offset in zip(column("event_id"), *values, strict=True):
        number = quantity if isinstance(quantity, int) else Decimal(quantity or 0)
        yield event_id, Delivered(str(key), version, number, partition, offset)


def _bytes(event_id: str) -> bytes:
    return bytes.fromhex(event_id.replace("-", ""))
