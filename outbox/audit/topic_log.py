"""The records of the topic, as far as they were read."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from outbox.audit.buckets import SALT_BYTES, Buckets
from outbox.audit.processes import read_parts
from outbox.audit.topic_part import Delivered, Malformed, PartReader, Refused, TopicPart
from outbox.base.errors import Failure
from outbox.base.settings import Settings
from outbox.kafka import records, topics
from outbox.sink.records import RecordDecoder, Records


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


class TopicLog:
    """The committed records of the topic, as far as it was read. Its memory does not grow with their number."""

    def __init__(
        self, decoder: RecordDecoder, topic_id: str | None = None, next_offsets: Mapping[int, int] | None = None
    ) -> None:
        """It begins where the topic does, or at ``next_offsets`` of the topic with this id."""
        self.salt = os.urandom(SALT_BYTES)  # of its buckets, and of those that are compared with them
        self._reader = PartReader(decoder, self.salt)
        self.topic_id = topic_id
        self.next_offsets = dict(next_offsets or {})
        self.has_gap = False  # the topic has dropped records that were not read
        self.is_whole = True  # the topic has dropped nothing yet
        self.dropped_until_ms = 0  # the topic may have dropped records that are not younger
        self.records = 0
        self.malformed = Malformed()
        self.delivered = Buckets(Delivered, self.salt)  # an event as often as it is on the topic
        self.refused = Buckets(Refused, self.salt)

    def close(self) -> None:
        """Delete its temporary files."""
        self.delivered.close()
        self.refused.close()

    def read_on(self, settings: Settings, progress: Callable[[str], None]) -> None:
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
        offsets = self.records + sum(last - first for first, last in within.values())
        for part in read_parts(self._reader, settings, within):
            self._add(part)
            progress(f"read {self.records:,} records of up to {offsets:,}")
        self.next_offsets = {number: last for number, (_, last) in within.items()}
        self.is_whole = not any(first for first, _ in watermarks.values())
        dropped_until = None if self.is_whole else records.dropped_until(settings)
        self.dropped_until_ms = 0 if dropped_until is None else int(dropped_until.timestamp() * 1000)

    def add(self, read: Records) -> None:
        """Add the next records of their partitions."""
        self._add(self._reader.part(read))

    def _add(self, part: TopicPart) -> None:
        self.records += part.records
        self.malformed.add_all(part.malformed)
        self.delivered.add_all(part.delivered)
        self.refused.add_all(part.refused)
