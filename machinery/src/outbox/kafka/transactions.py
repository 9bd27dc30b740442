"""Kafka transactions: records, and how far the reader of their events has come, committed together or not at all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition

from outbox.base.errors import Failure
from outbox.base.settings import Settings
from outbox.kafka.clients import client_config, consumer_config, request_timeout_s, unavailable

TIMEOUT_S = 50  # of a transaction; one of Postgres that waits for it may be idle for 60 seconds
ABORT_TIMEOUT_S = 5.0
UNBOUNDED = (1 << 31) - 1
FENCED = {KafkaError._FENCED, KafkaError.PRODUCER_FENCED, KafkaError.INVALID_PRODUCER_EPOCH}
# The answers to a record that no broker takes, however often it is sent.
REFUSED = {KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.INVALID_RECORD, KafkaError.POLICY_VIOLATION}


class Outgoing(NamedTuple):
    """A record to write."""

    key: bytes
    value: bytes
    headers: Sequence[tuple[str, bytes]]

    @property
    def size_bytes(self) -> int:
        """The size of key, value and headers."""
        return len(self.key) + len(self.value) + sum(len(name) + len(content) for name, content in self.headers)


class Transactions:
    """The transactions of one transactional id, which is also the group whose offsets they move.

    Making it ends what an earlier producer of this id has left open, and fences that producer. A key has the partition
    that Java's producers choose. No record may have more than ``max_bytes``.
    """

    def __init__(self, settings: Settings, name: str, max_bytes: int) -> None:
        """Raises Failure if Kafka is unavailable, or does not let us use the id."""
        self._settings, self._name = settings, name
        config = {
            "transactional.id": name,
            "transaction.timeout.ms": TIMEOUT_S * 1000,
            "message.max.bytes": max(1000, max_bytes),  # the least that librdkafka takes
            "partitioner": "murmur2_random",
            "queue.buffering.max.messages": 0,  # without a bound: the caller's batch has one
            "queue.buffering.max.kbytes": UNBOUNDED,
            "log_level": 0,
        }
        with self._errors():
            self._producer = Producer(client_config(settings) | config)
            self._producer.init_transactions(request_timeout_s())
            self._group = Consumer(consumer_config(settings, "read_committed") | {"group.id": name})

    def commit(self, topic: str, records: Iterable[Outgoing], offsets: Sequence[TopicPartition] = ()) -> None:
        """Write records to a topic, and move the group's offsets, in one transaction.

        Raises Failure `producer-fenced` if another producer has this id, `produce-refused` if the brokers take no such
        record, or as any client. Then nothing is committed; or everything, if an answer was lost.
        """
        with self._errors():
            self._producer.begin_transaction()
            try:
                for one in records:
                    self._producer.produce(topic, one.value, one.key, headers=list(one.headers))
                if offsets:
                    group = self._group.consumer_group_metadata()
                    self._producer.send_offsets_to_transaction(list(offsets), group, TIMEOUT_S)
                self._producer.commit_transaction(TIMEOUT_S)
            except KafkaException as error:
                try:
                    if error.args[0].code() == KafkaError._STATE:
                        self._producer.begin_transaction()  # raises the error that has ended the transaction before
                    raise
                finally:
                    with suppress(KafkaException):  # otherwise the next producer of the id ends it
                        self._producer.abort_transaction(ABORT_TIMEOUT_S)

    def committed(self, topic: str, text: str, partitions: Iterable[int]) -> dict[int, int]:
        """The offsets of the group that were committed with this text, by partition."""
        with self._errors():
            wanted = [TopicPartition(topic, number) for number in partitions]
            found = self._group.committed(wanted, request_timeout_s())
        return {place.partition: place.offset for place in found if place.offset >= 0 and place.metadata == text}

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except KafkaException as error:
            raise self._failure(error.args[0]) from error

    def _failure(self, error: KafkaError) -> Failure:
        if error.code() in FENCED:
            what = f"Kafka has fenced the producer {self._name}: {error.str()}"
            remedy = f"leave it to the later one; or start it again, if its transaction took longer than {TIMEOUT_S} s"
            return Failure(what, remedy, code="producer-fenced")
        if error.code() in REFUSED:
            what = f"Kafka refuses what {self._name} writes: {error.str()}"
            return Failure(what, "compare the topic's configuration", code="produce-refused")
        return unavailable(self._settings, error)
