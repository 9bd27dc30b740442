"""Read the topic of the events: its valid events, and the records that break the contract."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Context, Decimal
from typing import NamedTuple

from confluent_kafka import Message

from outbox.audit.buckets import Buckets
from outbox.base.errors import Failure
from outbox.base.settings import Settings
from outbox.kafka import records, topics
from outbox.sink.records import Event, Record, RecordDecoder, Rejection

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


@dataclass(slots=True)
class Versions:
    """The versions of one key's events."""

    lowest: int
    highest: int
    count: int

    @property
    def missing(self) -> int:
        """How many versions are missing between the lowest and the highest."""
        return max(0, self.highest - self.lowest + 1 - self.count)


def add_version(versions: dict[str, Versions], event: Delivered) -> None:
    """Count an event among the versions of its key; one without a version counts in none."""
    if event.version is None:
        return
    known = versions.setdefault(event.key, Versions(event.version, event.version, 0))
    known.lowest, known.highest = min(known.lowest, event.version), max(known.highest, event.version)
    known.count += 1


@dataclass
class Malformed:
    """The records that break the contract. Sinks set them aside; they count in no comparison."""

    count: int = 0
    first: str = ""  # place and reason
    reasons: Counter[str] = field(default_factory=Counter)

    def add(self, place: TopicOffset, rejection: Rejection) -> None:
        """Count a record."""
        self.count += 1
        self.first = self.first or f"{place}: {rejection.detail}"
        self.reasons[rejection.reason] += 1


class TopicLog:
    """The committed records of the topic, as far as it was read. Its memory does not grow with their number."""

    def __init__(
        self, decoder: RecordDecoder, topic_id: str | None = None, next_offsets: Mapping[int, int] | None = None
    ) -> None:
        """It begins where the topic does, or at ``next_offsets`` of the topic with this id."""
        self._decoder = decoder
        self._extract = extractor(decoder)
        self.topic_id = topic_id
        self.next_offsets = dict(next_offsets or {})
        self.has_gap = False  # the topic has dropped records that were not read
        self.is_whole = True  # the topic has dropped nothing yet
        self.dropped_until_ms = 0  # the topic may have dropped records that are not younger
        self.records = 0
        self.malformed = Malformed()
        self.delivered = Buckets(Delivered)  # an event as often as it is on the topic
        self.refused = Buckets(Refused)

    def close(self) -> None:
        """Delete its temporary files."""
        self.delivered.close()
        self.refused.close()

    def read_on(self, settings: Settings) -> None:
        """Read from where the last call stopped to the last stable offset.

        Transaction markers and aborted records are not counted. Raises Failure if the topic was recreated meanwhile, or
        if Kafka is unavailable.
        """
        topic_id = topics.describe(settings, settings.topic).id
        if self.topic_id not in (None, topic_id):
            raise Failure(
                f"topic {settings.topic} was recreated during the check", "run it again", code="topic-recreated"
            )
        self.topic_id = topic_id
        watermarks = topics.watermarks(settings, settings.topic)
        self.has_gap |= any(first > self.next_offsets.get(number, first) for number, (first, _) in watermarks.items())
        within = {
            number: (max(first, self.next_offsets.get(number, first)), last)
            for number, (first, last) in watermarks.items()
        }
        for message in records.read(settings, settings.topic, within):
            self.add(_record(message), TopicOffset(message.partition() or 0, message.offset() or 0))
        self.next_offsets = {number: last for number, (_, last) in within.items()}
        self.is_whole = not any(first for first, _ in watermarks.values())
        dropped_until = None if self.is_whole else records.dropped_until(settings)
        self.dropped_until_ms = 0 if dropped_until is None else int(dropped_until.timestamp() * 1000)

    def add(self, record: Record, place: TopicOffset) -> None:
        """Add the next record of its partition."""
        self.records += 1
        found = self._decoder.record(record)
        if isinstance(found, Rejection):
            self._refuse(record, place, found)
        else:
            self._deliver(found, place)

    def _refuse(self, record: Record, place: TopicOffset, rejection: Rejection) -> None:
        self.malformed.add(place, rejection)
        event_id = self._decoder.event_id(record)
        if event_id is not None:
            key = (record.key or b"").decode(errors="replace")
            self.refused.add(uuid.UUID(event_id).bytes, Refused(key, place))

    def _deliver(self, found: Event, place: TopicOffset) -> None:
        self.delivered.add(uuid.UUID(found.event_id).bytes, Delivered(*self._extract(found), *place))


def extractor(decoder: RecordDecoder) -> Callable[[Event], tuple[str, int | None, Quantity]]:
    """A function that returns key, version and quantity of an event, as the job declares them."""
    names = [column.name for column in decoder.columns]
    key_at = names.index(decoder.key)
    version_at = None if decoder.version is None else names.index(decoder.version)
    quantity_at = None if decoder.quantity is None else names.index(decoder.quantity)

    def extract(event: Event) -> tuple[str, int | None, Quantity]:
        version = None if version_at is None else event.values[version_at]
        quantity = 0 if quantity_at is None else event.values[quantity_at]
        return (
            str(event.values[key_at]),
            None if version is None else int(version),
            quantity if isinstance(quantity, int) else Decimal(quantity or 0),
        )

    return extract


def _record(message: Message) -> Record:
    key, value = message.key(), message.value()
    pairs: list[tuple[str, str | bytes | None]] = list(message.headers() or [])  # type: ignore[arg-type]  # stubs are wider
    headers = [(name, content.encode() if isinstance(content, str) else content) for name, content in pairs]
    return Record(
        key.encode() if isinstance(key, str) else key,
        headers,
        value.encode() if isinstance(value, str) else value,
        message.timestamp()[1],
    )
