"""The offsets that Connect stores for a connector, as records of its offsets topic, and transactions that hang there.

Connect cancels a task that does not stop in time, for example because a topic was deleted while it writes. Its
transaction stays open until the broker ends it, a minute later. `end_left_open` does so at once.

A broker that is killed while it commits a transaction, and started again, may mark the transaction as complete without
writing the markers that end it in its partitions (KAFKA-20734, seen with Kafka 4.3.1). Readers of committed records
then stop in front of it. Connect is one of them: it reads its offsets to their end, so the relay stands still, and the
connector's state is RUNNING. Nothing is lost. `end_hanging` ends the transaction.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime

from confluent_kafka import KafkaError, KafkaException, Message, Producer, TopicPartition

from outbox.base.errors import Failure
from outbox.base.settings import Settings
from outbox.base.wait import WaitTimeoutError
from outbox.kafka import records, topics
from outbox.kafka.clients import client_config, consumer, request_timeout_s, unavailable
from outbox.relay.connectors import Connector

# Connect's transactions time out after a minute, and a broker ends expired ones every ten seconds.
END_TIMEOUT_S = 75.0
RELEASE_TIMEOUT_S = 15.0


def open_since(settings: Settings, connector: Connector) -> datetime | None:
    """When the oldest open transaction on the connector's offsets topic wrote its first record; None if none is open.

    One that is open for longer than ``END_TIMEOUT_S`` hangs.
    """
    topic, begun = connector.offsets_topic, list[datetime]()
    for partition, stable in _open(settings, connector).items():
        with consumer(settings, "read_uncommitted") as client:
            client.assign([TopicPartition(topic, partition, stable)])
            message = client.poll(request_timeout_s())
        if message is not None and message.error() is None:  # else it has ended meanwhile
            begun.append(datetime.fromtimestamp(message.timestamp()[1] / 1000, UTC))
    return min(begun, default=None)


def _open(settings: Settings, connector: Connector) -> dict[int, int]:
    """By partition of the connector's offsets topic with an open transaction, the offset of its first record. We make
    the topic with one partition; Connect makes one with several if nobody has made it before.
    """
    stable = topics.last_stable_offsets(settings, connector.offsets_topic)
    ends = topics.high_watermarks(settings, connector.offsets_topic)
    return {partition: offset for partition, offset in stable.items() if offset < ends[partition]}


def end_hanging(settings: Settings, connector: Connector, on_release: Callable[[], None] = lambda: None) -> bool:
    """End a hanging transaction on the connector's offsets topic; False if no transaction hangs.

    An open transaction may still end by itself: that is waited for, for longer than a transaction may take. Then it is
    aborted under the task's transactional id, which fences the task: restart the connector. The task resends the events
    of that transaction. They go to the same partitions, where the end of the task's next transaction ends the hanging
    one too. So these events are on the topic twice, and sinks skip them. ``on_release`` is called then, and also if
    Kafka does not answer after the abort.

    Raises Failure if Kafka is unavailable, or if the transaction belongs to another producer.
    """
    topic = connector.offsets_topic
    try:
        topics.wait_decided(settings, topic, END_TIMEOUT_S)
    except WaitTimeoutError:
        _abort(settings, connector)
    else:
        return False
    try:
        topics.wait_decided(settings, topic, RELEASE_TIMEOUT_S)
    except WaitTimeoutError:
        raise Failure(
            f"a transaction on topic {topic} hangs, and it is not one of connector {connector.name}",
            "set OUTBOX_CONNECT_GROUP_ID to the worker's group.id, or abort it: `kafka-transactions.sh find-hanging`",
            code="transaction-hanging",
        ) from None
    except Failure:
        on_release()
        raise
    on_release()
    return True


def end_left_open(settings: Settings, connector: Connector) -> None:
    """Abort what the task of a removed connector has left open there, and fence the task if it still runs.

    A transaction that has not reached the offsets topic stays open until the broker ends it.

    Raises Failure if Kafka is unavailable.
    """
    if topics.exists(settings, connector.offsets_topic) and open_since(settings, connector):
        _abort(settings, connector)


def _abort(settings: Settings, connector: Connector) -> None:
    """Abort a transaction of the task's producer that has a record in the offsets topic.

    The marker ends whatever this producer has left open in the partitions. The id is Connect's
    (`Worker.taskTransactionalId`); a Debezium connector for Postgres has one task.
    """
    partitions = [*_open(settings, connector)]
    transactional_id = f"{settings.connect_group_id}-{connector.name}-0"
    try:
        producer = Producer({**client_config(settings), "transactional.id": transactional_id})
        producer.init_transactions(request_timeout_s())
        producer.begin_transaction()
        for partition in partitions:
            producer.produce(connector.offsets_topic, b"", key=b"aborted", partition=partition)
        producer.flush(request_timeout_s())
        producer.abort_transaction(request_timeout_s())
    except KafkaException as error:
        raise unavailable(settings, error.args[0]) from error


def delete(settings: Settings, connector: Connector) -> None:
    """Delete the stored offsets of a connector, which must not run.

    Connect keeps a copy in the worker's topic beside the connector's own. Each entry in both is deleted by a tombstone.
    An interrupted deletion can be repeated. Connect's own request (DELETE /connectors/NAME/offsets) fails for a
    connector with its own offsets topic on a worker with exactly-once: it commits its transaction before it has written
    to both topics (seen with Connect 4.3.1: "Cannot add partition … while in state READY").
    """
    producer = Producer({**client_config(settings), "acks": "all"})
    refused = list[str]()

    def delivered(error: KafkaError | None, message: Message) -> None:
        if error is not None:
            refused.append(f"{message.topic()}: {error}")

    for topic in topics.existing(settings, [connector.offsets_topic, settings.connect_offsets_topic]):
        for key in _stored(settings, topic, connector):
            producer.produce(topic, key=key, value=None, on_delivery=delivered)
    if producer.flush(request_timeout_s()) or refused:
        because = f", {refused[0]}" if refused else ""
        what = f"Kafka did not delete the stored offsets{because}"
        raise Failure(what, "correct the cause, and run the command again", code="offsets-kept")


def require_topic(settings: Settings) -> None:
    """Raises Failure if the topic in which the worker keeps its copy of the offsets does not exist."""
    if not topics.exists(settings, settings.connect_offsets_topic):
        raise Failure(
            f"there is no topic {settings.connect_offsets_topic}, in which the worker keeps offsets",
            "set OUTBOX_CONNECT_OFFSETS_TOPIC to the worker's offset.storage.topic",
            code="offsets-kept",
        )


def _stored(settings: Settings, topic: str, connector: Connector) -> list[bytes]:
    """The keys of the connector's entries that are not deleted yet."""
    stored: dict[bytes, bool] = {}
    for message in records.read(settings, topic, topics.watermarks(settings, topic)):
        key = message.key()
        if isinstance(key, bytes) and _owner(key) == connector.name:
            stored[key] = message.value() is not None
    return [key for key, has_value in stored.items() if has_value]


def _owner(key: bytes) -> str | None:
    """The connector of an entry. Its key is JSON: the connector's name and the source's partition."""
    try:
        return str(json.loads(key)[0])
    except (ValueError, LookupError, TypeError):
        return None
