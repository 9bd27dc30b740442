"""The events on the topic, read from its start: which there are, which come twice, which versions are missing."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from confluent_kafka import Message

from outbox.base.settings import Settings
from outbox.kafka import records, topics

Place = tuple[int, int]  # partition and offset
Awaited = Callable[[bytes, Place], bool]


class Event(NamedTuple):
    """What is compared of an event: how much it adds to which key, as its n-th event."""

    key: str
    amount: int
    version: int


@dataclass(frozen=True)
class Surplus:
    """A record of the topic whose event id stands on the topic before it."""

    partition: int
    offset: int
    event_id: uuid.UUID
    key: str
    amount: int


@dataclass
class Versions:
    """The distinct events of one key that are on the topic."""

    lowest: int
    highest: int
    count: int

    @property
    def gaps(self) -> int:
        """How many versions are missing between the lowest and the highest."""
        return self.highest - self.lowest + 1 - self.count


@dataclass
class TopicLog:
    """Everything committed on the topic when it was read."""

    is_whole: bool  # nothing has aged out of it yet
    is_awaited: Awaited = lambda _event, _place: False
    first: dict[bytes, Place] = field(default_factory=dict)  # event id: where it stands the first time
    awaited: dict[bytes, Event] = field(default_factory=dict)  # by event id, those that are awaited
    surplus: list[Surplus] = field(default_factory=list)
    versions: dict[str, Versions] = field(default_factory=dict)  # by key
    records: int = 0
    malformed: int = 0  # no event: without id, or no JSON with amount and version; sinks set them aside

    def add(self, message: Message) -> None:
        """Take in the next record of its partition."""
        self.records += 1
        place = partition, offset = message.partition() or 0, message.offset() or 0
        try:
            event_id = id_of(message)
            event = json.loads(message.value() or b"")
            key, amount, version = (message.key() or b"").decode(), int(event["amount"]), int(event["version"])
        except (KeyError, TypeError, ValueError, AttributeError):
            self.malformed += 1
            return
        if event_id.bytes in self.first:
            self.surplus.append(Surplus(partition, offset, event_id, key, amount))
            return
        self.first[event_id.bytes] = place
        if self.is_awaited(event_id.bytes, place):
            self.awaited[event_id.bytes] = Event(key, amount, version)
        known = self.versions.setdefault(key, Versions(version, version, 0))
        known.lowest, known.highest = min(known.lowest, version), max(known.highest, version)
        known.count += 1


def read_topic(settings: Settings, is_awaited: Awaited = lambda _event, _place: False) -> TopicLog:
    """Read the topic from its start to its last stable offset; markers and aborted records are not counted.

    Events themselves are kept only of those, told by id and place, that ``is_awaited`` is true of.
    """
    within = topics.watermarks(settings, settings.topic)
    log = TopicLog(is_whole=not any(first for first, _ in within.values()), is_awaited=is_awaited)
    for message in records.read(settings, settings.topic, within):
        log.add(message)
    return log


def id_of(message: Message) -> uuid.UUID:
    """The event's id. Raises KeyError, AttributeError or ValueError if the record has none."""
    headers: dict[str, bytes] = dict(message.headers() or [])  # type: ignore[arg-type]  # stubs allow str too
    return uuid.UUID(headers["id"].decode())
