"""How far sinks are behind their topic.

Spark's Kafka source commits nothing to a consumer group, so no tool of Kafka can know this: the sinks report it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import NamedTuple

from confluent_kafka import TIMESTAMP_NOT_AVAILABLE, Consumer, KafkaError, KafkaException, Message, TopicPartition

from outbox.base.settings import Settings
from outbox.kafka.clients import client_config
from outbox.sink.remembering.positions import Offsets

TIMEOUT_S = 2.0  # of one look-up, all of it; Prometheus waits 10 s for a scrape
MIN_WAIT_S = 0.001  # librdkafka takes 0 for "whatever is there", and a negative time for "forever"
PASSING_ERRORS = {KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN}  # librdkafka tries again by itself


class Lag(NamedTuple):
    """How far one sink is behind.

    ``offsets``: by partition, the last stable offset minus the next offset to apply. That is the number of events that
    are committed and not applied, or slightly more, because transaction markers and aborted records take offsets too.
    0 means that nothing is missing.

    ``age_s``: seconds since the broker received the oldest committed record that is not applied; 0.0 if all are
    applied. It compares two clocks, the broker's and ours.
    """

    offsets: Offsets
    age_s: float


class LagLookup:
    """Asks Kafka for the lag of the sinks of one topic, on a connection of its own, so that no sink waits for it.

    It connects at the first question. Several threads may ask; they take turns.
    """

    def __init__(self, settings: Settings, topic: str) -> None:
        self._settings = settings
        self._topic = topic
        self._turn = threading.Lock()
        self._consumer: Consumer | None = None
        self._closed = False

    def ask(self, next_offsets: Mapping[str, Offsets], timeout_s: float = TIMEOUT_S) -> dict[str, Lag] | None:
        """The lag by sink, given the next offsets that each will apply. A partition without an offset is at 0.

        All of them, or None if Kafka did not answer in time; never an error.
        """
        deadline = time.monotonic() + timeout_s
        if not self._turn.acquire(timeout=timeout_s):
            return None
        try:
            if self._closed:
                return None
            ends = self._ends(deadline)
            return {sink: self._lag(ends, offsets, deadline) for sink, offsets in next_offsets.items()}
        except (KafkaException, TimeoutError):
            return None
        finally:
            self._turn.release()

    def close(self) -> None:
        """Disconnect once a running question is answered. Later questions return None."""
        with self._turn:
            self._closed = True
            if self._consumer is not None:
                self._consumer.close()

    def _lag(self, ends: Offsets, next_offsets: Offsets, deadline: float) -> Lag:
        # Never below 0, also if the sink advanced meanwhile or the topic was recreated.
        offsets = {partition: max(0, end - next_offsets.get(partition, 0)) for partition, end in ends.items()}
        behind = {partition: next_offsets.get(partition, 0) for partition, count in offsets.items() if count}
        oldest_s = self._oldest_s(behind, deadline) if behind else None
        return Lag(offsets, 0.0 if oldest_s is None else max(0.0, time.time() - oldest_s))

    def _ends(self, deadline: float) -> dict[int, int]:
        """By partition the last stable offset. Partitions may be added, so they are asked for each time."""
        consumer = self._connected()
        metadata = consumer.list_topics(self._topic, timeout=_left_s(deadline)).topics[self._topic]
        if metadata.error is not None:
            raise KafkaException(metadata.error)
        ends = {}
        for partition in metadata.partitions:
            place = TopicPartition(self._topic, partition)
            found = consumer.get_watermark_offsets(place, timeout=_left_s(deadline))
            if found is None:
                raise TimeoutError
            ends[partition] = found[1]
        return ends

    def _oldest_s(self, behind: Offsets, deadline: float) -> float | None:
        """When the broker received the oldest committed record at or after these offsets, as Unix time in seconds."""
        consumer, waiting, found_s = self._connected(), set(behind), []
        consumer.assign([TopicPartition(self._topic, partition, offset) for partition, offset in behind.items()])
        try:
            while waiting:
                message = consumer.poll(_left_s(deadline))
                if message is None or _is_passing(message):
                    continue
                partition = message.partition()
                if partition is None or partition not in waiting:
                    continue
                waiting.remove(partition)
                # Its other records would be polled before the first record of another partition.
                consumer.incremental_unassign([TopicPartition(self._topic, partition)])
                kind, at_ms = message.timestamp()
                if message.error() is None and kind != TIMESTAMP_NOT_AVAILABLE:
                    found_s.append(at_ms / 1000)
        finally:
            consumer.unassign()
        return min(found_s, default=None)

    def _connected(self) -> Consumer:
        if self._consumer is None:
            self._consumer = Consumer(
                {
                    **client_config(self._settings),
                    "group.id": "outbox-sink-lag",  # librdkafka requires one; nothing is committed to it
                    "isolation.level": "read_committed",
                    "enable.auto.commit": False,
                    "enable.auto.offset.store": False,
                    "auto.offset.reset": "earliest",  # dropped records do not count
                    "enable.partition.eof": True,  # a lag of markers alone has no record to wait for
                    "fetch.wait.max.ms": 20,
                    # One record per partition is needed; it arrives with its whole batch, and no more. The queue keeps
                    # its default length: a short one is full at once, and librdkafka then waits a second before it
                    # fetches from the next partition.
                    "max.partition.fetch.bytes": 1 << 16,
                    "log_level": 0,
                }
            )
        return self._consumer


def _is_passing(message: Message) -> bool:
    """Whether it is a transient error. Raises KafkaException for one that is not."""
    error = message.error()
    if error is None or error.code() == KafkaError._PARTITION_EOF:
        return False
    if error.code() not in PASSING_ERRORS:
        raise KafkaException(error)
    return True


def _left_s(deadline: float) -> float:
    """Seconds left, never none. Raises TimeoutError past the deadline."""
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return max(left_s, MIN_WAIT_S)
