"""The records of the declared topics, as far as they were read."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from outbox.audit.buckets import SALT_BYTES, Buckets
from outbox.audit.declared import EventTopic
from outbox.audit.processes import read_parts
from outbox.audit.topic_part import Delivered, PartReader, Refused, TopicPart
from outbox.base.errors import Failure
from outbox.base.settings import Settings
from outbox.kafka import records, topics
from outbox.kafka.records import Within
from outbox.sink.decoding.records import Records


@dataclass
class TopicEnd:
    """How far a topic was read."""

    topic_id: str | None = None
    next_offsets: dict[int, int] = field(default_factory=dict)
    has_gap: bool = False  # the topic has dropped records that were not read
    is_whole: bool = True  # the topic has dropped nothing yet
    dropped_until_ms: int = 0  # the topic may have dropped records that are not younger
    records: int = 0


class TopicLogs:
    """The committed records of the topics, as far as they were read. Memory does not grow with their number."""

    def __init__(self, declared: Sequence[EventTopic], ends: Mapping[str, TopicEnd] | None = None) -> None:
        """Begin where the topics do, or at the ``ends`` of what was read before."""
        self.salt = os.urandom(SALT_BYTES)  # of its buckets, and of those that are compared with them
        self.ends = [(ends or {}).get(topic.name) or TopicEnd() for topic in declared]
        self._topics = declared
        self._reader = PartReader(declared, self.salt)
        self.delivered = Buckets(Delivered, self.salt)  # an event as often as it is on a topic
        self.refused = Buckets(Refused, self.salt)

    def close(self) -> None:
        """Delete the temporary files."""
        self.delivered.close()
        self.refused.close()

    @property
    def records(self) -> int:
        """How many were read, of all topics."""
        return sum(end.records for end in self.ends)

    def read_on(self, settings: Settings, progress: Callable[[str], None]) -> None:
        """Read from where the last call stopped to the last stable offsets.

        Transaction markers and aborted records are not counted. Raises Failure if a topic was recreated meanwhile, or
        if Kafka is unavailable.
        """
        within = {topic.number: self._new(settings, topic) for topic in self._topics}
        size = sum(last - first for of_topic in within.values() for first, last in of_topic.values())
        offsets = self.records + size
        for part in read_parts(self._reader, settings, within):
            self._add(part)
            progress(f"read {self.records:,} records of up to {offsets:,}")
        for topic in self._topics:
            end = self.ends[topic.number]
            end.next_offsets = {number: last for number, (_, last) in within[topic.number].items()}
            dropped_until = None if end.is_whole else records.dropped_until(settings, topic.name)
            end.dropped_until_ms = 0 if dropped_until is None else int(dropped_until.timestamp() * 1000)

    def add(self, topic: int, read: Records) -> None:
        """Add the next records of their partitions of the topic with this number."""
        self._add(self._reader.part(topic, read))

    def _new(self, settings: Settings, topic: EventTopic) -> Within:
        """The offsets of a topic that were not read."""
        end, name = self.ends[topic.number], topic.name
        topic_id = topics.describe(settings, name).id
        if end.topic_id not in (None, topic_id):
            raise Failure(f"topic {name} was recreated during the check", "run the check again", code="topic-recreated")
        end.topic_id = topic_id
        watermarks = topics.watermarks(settings, name)
        end.has_gap |= any(first > end.next_offsets.get(number, first) for number, (first, _) in watermarks.items())
        end.is_whole = not any(first for first, _ in watermarks.values())
        return {
            number: (max(first, end.next_offsets.get(number, first)), last)
            for number, (first, last) in watermarks.items()
        }

    def _add(self, part: TopicPart) -> None:
        self.ends[part.topic].records += part.records
        self.delivered.add_all(part.delivered)
        self.refused.add_all(part.refused)
