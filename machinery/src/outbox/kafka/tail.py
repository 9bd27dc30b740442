"""Follow topics: whatever comes on them, from given offsets on."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack

from confluent_kafka import KafkaError, Message, TopicPartition

from outbox.base.settings import Settings
from outbox.kafka.clients import follower, kafka_errors, request_timeout_s
from outbox.kafka.records import ends
from outbox.kafka.topics import missing

RECORDS_AT_ONCE = 2_000  # each takes 2 KB in Python; more at once are no faster
LOOK_EVERY_S = 5.0  # for new partitions, and for whether Kafka answers: a consumer waits for its brokers for ever
# Nothing waits for a fetch to end: a broker answers at once when something new is committed.
FETCH_WAIT_MS = 500

Offsets = Mapping[str, Mapping[int, int]]  # by topic and partition


class Tail:
    """A consumer of all partitions of some topics. It belongs to no group and commits nothing.

    For one thread. Partitions that a topic gets later are read from their beginning.
    """

    def __init__(self, settings: Settings, start: Offsets) -> None:
        """Raises Failure if Kafka is unavailable."""
        self._settings = settings
        self._at = {(topic, number): offset for topic, of_topic in start.items() for number, offset in of_topic.items()}
        with kafka_errors(settings), ExitStack() as opened:
            self._client = follower(settings, FETCH_WAIT_MS)
            opened.callback(self._client.close)
            self._client.assign([TopicPartition(*place, offset) for place, offset in self._at.items()])
            self._look()
            opened.pop_all()

    def read(self, timeout_s: float, at_once: int) -> Iterator[Mapping[str, Sequence[Message]]]:
        """Committed records by topic, those of a partition in order: as many as are there, ``at_once`` at a time.

        Waits ``timeout_s`` for the first ones. Raises Failure if Kafka is unavailable, or if a topic has dropped what
        was to be read.
        """
        with kafka_errors(self._settings):
            if time.monotonic() >= self._due_at:
                self._look()
            first = self._client.poll(timeout_s)
            while first is not None:
                yield self._by_topic([first, *self._client.consume(min(at_once, RECORDS_AT_ONCE) - 1, 0)])
                first = self._client.poll(0)

    def reached(self) -> dict[str, dict[int, int]]:
        """The offsets behind all records that were read. Transaction markers and aborted records are passed too."""
        with kafka_errors(self._settings):
            for place in self._client.position([TopicPartition(*place) for place in self._at]):
                self._pass(place.topic, place.partition, place.offset)
        found: dict[str, dict[int, int]] = {}
        for (topic, partition), offset in self._at.items():
            found.setdefault(topic, {})[partition] = offset
        return found

    def close(self) -> None:
        """Leave Kafka."""
        self._client.close()

    def _by_topic(self, messages: Sequence[Message]) -> dict[str, list[Message]]:
        stops = ends(messages)
        for stop in stops:  # aborted records at the end of a partition show in its offset alone
            self._pass(stop.topic() or "", stop.partition() or 0, stop.offset() or 0)
        found: dict[str, list[Message]] = {}
        for message, topic in zip(messages, map(Message.topic, messages), strict=True):
            if not stops or message.error() is None:
                found.setdefault(topic or "", []).append(message)
        return found

    def _pass(self, topic: str, partition: int, offset: int) -> None:
        self._at[topic, partition] = max(self._at[topic, partition], offset)

    def _look(self) -> None:
        """Read new partitions too. Raises KafkaException if no broker answers, and Failure if a topic is gone."""
        for topic in {topic for topic, _ in self._at}:
            found = self._client.list_topics(topic, request_timeout_s()).topics[topic]
            if found.error is not None and found.error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
                raise missing(topic)
            new = {(topic, partition) for partition in found.partitions} - self._at.keys()
            if new:
                self._at |= dict.fromkeys(new, 0)
                self._client.incremental_assign([TopicPartition(*place, 0) for place in sorted(new)])
        self._due_at = time.monotonic() + LOOK_EVERY_S
