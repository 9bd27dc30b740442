"""Kafka transactions: records, and how far the reader of their events has come, committed together or not at all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition

from outbox.base.errors import Failure
from outbox.base.settings import Settings
from outbox.kafka.clients import client_config, consumer_config, request_timeout_s, unavailable
from outbox.kafka.spec import Header

TIMEOUT_S = 50  # of a transaction; a transaction of Postgres that waits for it may be idle for 60 seconds
ABORT_TIMEOUT_S = 5.0
UNBOUNDED = (1 << 31) - 1
# Of a producer that another one has replaced, or whose transaction the brokers have ended.
FENCED = {KafkaError._FENCED, KafkaError.PRODUCER_FENCED, KafkaError.INVALID_PRODUCER_EPOCH}
# The answers to a record that no broker takes, however often it is sent.
REFUSED = {
    KafkaError.MSG_SIZE_TOO_LARGE,
    KafkaError.RECORD_LIST_TOO_LARGE,
    KafkaError.INVALID_RECORD,
    KafkaError.INVALID_MSG,
    KafkaError.POLICY_VIOLATION,
}


class Outgoing(NamedTuple):
    """A record to write."""

    key: bytes
    value: bytes
    headers: Sequence[Header]


class Mark(NamedTuple):
    """An offset that a group has committed, and the text beside it."""

    offset: int
    text: str


class Transactions:
    """The transactions of one transactional id, which is also the group whose offsets they move.

    Making it ends what an earlier producer of this id has left open, and fences that producer. A key has the partition
    that Java's producers choose.
    """

    def __init__(self, settings: Settings, name: str, record_max_bytes: int) -> None:
        """Raises Failure if Kafka is unavailable, or does not let us use the id."""
        self._settings, self._name = settings, name
        config = {
            **client_config(settings),
            "transactional.id": name,
            "transaction.timeout.ms": TIMEOUT_S * 1000,
            "message.max.bytes": record_max_bytes,
            "partitioner": "murmur2_random",
            "queue.buffering.max.messages": 0,  # without a bound: the caller's batch has one
            "queue.buffering.max.kbytes": UNBOUNDED,
            "log_level": 0,
        }
        with self._errors():
            self._producer = Producer(config)
            self._producer.init_transactions(request_timeout_s())
            self._group = Consumer({**consumer_config(settings, "read_committed"), "group.id": name})

    def commit(self, topic: str, records: Iterable[Outgoing], offsets: Sequence[TopicPartition] = ()) -> None:
        """Write records to a topic, and move the group's offsets, in one transaction.

        Raises Failure `producer-fenced` if another producer has this id, `produce-refused` if the brokers take no such
        record, or as any client. Then nothing is committed; or, if an answer was lost, maybe everything.
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
            except KafkaException:
                with suppress(KafkaException):  # otherwise the next producer of the id ends it
                    self._producer.abort_transaction(ABORT_TIMEOUT_S)
                raise

    def committed(self, topic: str, partitions: int) -> dict[int, Mark]:
        """The offsets of the group, by partition; of transactions that have ended."""
        with self._errors():
            wanted = [TopicPartition(topic, number) for number in range(partitions)]
            found = self._group.committed(wanted, request_timeout_s())
        return {place.partition: Mark(place.offset, place.metadata or "") for place in found if place.offset >= 0}

    def ends(self, topic: str, partitions: int) -> list[int]:
        """By partition, an offset that all records that are written from now on are behind."""
        with self._errors():
            places = [TopicPartition(topic, number) for number in range(partitions)]
            return [self._group.get_watermark_offsets(place, request_timeout_s())[1] for place in places]

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except KafkaException as error:
            raise self._failure(error.args[0]) from error

    def _failure(self, error: KafkaError) -> Failure:
        if error.code() in FENCED:
            return Failure(
                f"Kafka has fenced the producer {self._name}: {error.str()}",
                f"leave it to the later one; there is none if a transaction has taken longer than {TIMEOUT_S} s",
                code="producer-fenced",
            )
        if error.code() in REFUSED:
            remedy = "compare the topic's configuration: max.message.bytes, cleanup.policy"
            return Failure(f"Kafka refuses what {self._name} writes: {error.str()}", remedy, code="produce-refused")
        return unavailable(self._settings, error)
