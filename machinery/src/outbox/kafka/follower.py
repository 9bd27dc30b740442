"""Follow topics: in short ranges that somebody else plans (`Follower`), or whatever comes (`Tail`)."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from confluent_kafka import Consumer, KafkaError, Message, TopicPartition

from outbox.base.settings import Settings
from outbox.kafka.clients import consumer_config, kafka_errors, request_timeout_s
from outbox.kafka.records import ends, is_end, require_progress
from outbox.kafka.topics import missing

POLL_S = 0.001  # a range that ends with a transaction's marker is known to be read after the next poll
# Records held for later; then a partition that is read to its end pauses after one more. Behind so many, the next range
# is no short one.
AHEAD_MAX_RECORDS = 100
RANGE_FETCH_WAIT_MS = 50  # for something new; a read that begins elsewhere waits that long for the fetch before it
RECORDS_AT_ONCE = 2_000  # each takes 2 KB in Python; more at once are no faster
LOOK_EVERY_S = 5.0  # for new partitions, and for whether Kafka answers: a consumer waits for its brokers for ever
# Nothing waits for a fetch to end: a broker answers at once when something new is committed.
TAIL_FETCH_WAIT_MS = 500

Offsets = Mapping[str, Mapping[int, int]]  # by topic and partition


class Closed(Exception):
    """Ends a read whose follower was closed."""


class Follower:
    """A consumer that fetches ahead: a range that follows the last one is here by the time it is asked for.

    It belongs to no group and commits nothing. One thread may read; any may close it meanwhile.
    """

    def __init__(self, settings: Settings, topic: str) -> None:
        """Raises Failure if Kafka is unavailable."""
        self._settings = settings
        self._topic = topic
        self._is_closed = False
        self._lock = threading.Lock()  # of the client, which must not be closed while it works
        self._next: dict[int, int] = {}  # what was read up to, by partition; empty unless it was read to its end
        self._ahead: list[Message] = []  # received, and behind what was asked for
        self._paused: set[int] = set()  # partitions that fetch nothing until the next read
        with kafka_errors(settings), ExitStack() as opened:
            self._client = _consumer(settings, RANGE_FETCH_WAIT_MS)
            # It then knows where the partitions are. Found out by the first read, that may take most of a second.
            opened.callback(self._client.close)
            self._client.list_topics(topic, request_timeout_s())
            opened.pop_all()

    def read(self, start: Mapping[int, int], end: Mapping[int, int]) -> Iterator[Message]:
        """The committed records between these offsets; those of a partition in order.

        Raises Failure if Kafka is unavailable, if it sends nothing of these records for a while, or if the topic has
        dropped one of these offsets; Closed.
        """
        is_next = all(self._next.get(partition) == offset for partition, offset in start.items())
        with self._open() as client:
            # Paused partitions are fetched on behind the last record that was received.
            client.resume([TopicPartition(self._topic, partition) for partition in self._paused])
            if not is_next:
                client.assign([TopicPartition(self._topic, *place) for place in start.items()])
        self._paused.clear()
        if not is_next:
            self._ahead = []
        received, self._next, self._ahead = deque(self._ahead), {}, []
        at, ahead = dict(start), list[Message]()
        progress_at = time.monotonic()
        while left := [partition for partition in end if at[partition] < end[partition]]:
            message = received.popleft() if received else self._poll()
            if message is None:
                # The end may be a marker, which no consumer returns but passes.
                reached = {number: offset for number, offset in self.positions(left).items() if offset > at[number]}
                at |= reached
                has_progress = bool(reached)
            elif is_end(message):
                # Or an aborted record whose marker is not to be read yet.
                partition, offset = message.partition() or 0, message.offset() or 0
                has_progress = partition in left and offset > at[partition]
                at[partition] = max(at[partition], offset)
                if offset > end[partition]:
                    ahead.append(message)
            else:
                partition, offset = message.partition() or 0, message.offset() or 0
                has_progress = partition in left
                at[partition] = offset + 1
                if offset < end[partition]:
                    yield message
                else:
                    ahead.append(message)
                    if len(ahead) > AHEAD_MAX_RECORDS:
                        with self._open() as client:
                            client.pause([TopicPartition(self._topic, partition)])
                        self._paused.add(partition)
            # Records behind the end are no progress: they would hide that another partition sends nothing.
            if has_progress:
                progress_at = time.monotonic()
            else:
                require_progress(self._topic, progress_at)
        self._next, self._ahead = dict(end), [*ahead, *received]

    def positions(self, partitions: Collection[int]) -> dict[int, int]:
        """By partition the offset behind the last record that was received."""
        with self._open() as client:
            places = client.position([TopicPartition(self._topic, partition) for partition in partitions])
        return {place.partition: place.offset for place in places}

    def close(self) -> None:
        """Leave Kafka, and end the read that waits for records."""
        self._is_closed = True  # before the lock, which a read that waits hardly ever gives away
        with self._lock:
            self._client.close()

    def _poll(self) -> Message | None:
        with self._open() as client:
            message = client.poll(POLL_S)
            if message is not None:
                ends([message])  # raises its error
        return message

    @contextmanager
    def _open(self) -> Iterator[Consumer]:
        with self._lock, kafka_errors(self._settings):
            if self._is_closed:
                raise Closed
            yield self._client


class Tail:
    """A consumer of all partitions of some topics. It belongs to no group and commits nothing.

    For one thread. Partitions that a topic gets later are read from their beginning.
    """

    def __init__(self, settings: Settings, start: Offsets) -> None:
        """Raises Failure if Kafka is unavailable."""
        self._settings = settings
        self._at = {(topic, number): offset for topic, of_topic in start.items() for number, offset in of_topic.items()}
        with kafka_errors(settings), ExitStack() as opened:
            self._client = _consumer(settings, TAIL_FETCH_WAIT_MS)
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


def _consumer(settings: Settings, fetch_wait_ms: int) -> Consumer:
    """A consumer of committed records from offsets that it is assigned. It says where a partition ends, and fails where
    records are gone. A fetch waits ``fetch_wait_ms`` for something new.
    """
    return Consumer(
        {
            **consumer_config(settings, "read_committed"),
            "auto.offset.reset": "error",
            "fetch.wait.max.ms": fetch_wait_ms,
            "enable.partition.eof": True,
        }
    )
