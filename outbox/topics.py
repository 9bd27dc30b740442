"""The Kafka topics: how clients reach the brokers, which topic we make, how far they are committed."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from typing import NamedTuple

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource  # type: ignore[attr-defined]  # not said in its stubs
from confluent_kafka.cimpl import NewTopic

from outbox import connectors
from outbox.connectors import Connector
from outbox.errors import Failure
from outbox.settings import Settings

TIMEOUT_S = 10.0
FETCH_RECORDS = 10_000
POLL_S = 0.1  # consume() waits so long for a full list
SILENCE_TIMEOUT_S = 30.0


class Topic(NamedTuple):
    """A topic as the brokers know it. ``id`` changes when a topic is deleted and made again under the same name."""

    name: str
    id: str
    partitions: int


def client_config(settings: Settings) -> dict[str, str | int | float | bool]:
    """librdkafka's settings for reaching the brokers, for any client of confluent-kafka."""
    config: dict[str, str | int | float | bool] = {
        "bootstrap.servers": settings.kafka_bootstrap,
        "security.protocol": settings.kafka_security_protocol,
    }
    if settings.kafka_cafile is not None:
        config["ssl.ca.location"] = str(settings.kafka_cafile)
    if settings.kafka_username is not None:
        config["sasl.mechanism"] = settings.kafka_sasl_mechanism
        config["sasl.username"] = settings.kafka_username
        config["sasl.password"] = settings.kafka_password.get_secret_value()
    return config


def spark_options(settings: Settings) -> dict[str, str]:
    """The same for Spark's Kafka source, whose Java client has its own names."""
    options = {
        "kafka.bootstrap.servers": settings.kafka_bootstrap,
        "kafka.security.protocol": settings.kafka_security_protocol,
    }
    if settings.kafka_cafile is not None:
        options["kafka.ssl.truststore.type"] = "PEM"
        options["kafka.ssl.truststore.location"] = str(settings.kafka_cafile)
    if settings.kafka_username is not None:
        scram = settings.kafka_sasl_mechanism.startswith("SCRAM")
        module = "scram.ScramLoginModule" if scram else "plain.PlainLoginModule"
        user, password = (
            _quoted(word) for word in (settings.kafka_username, settings.kafka_password.get_secret_value())
        )
        options["kafka.sasl.mechanism"] = settings.kafka_sasl_mechanism
        options["kafka.sasl.jaas.config"] = (
            f"org.apache.kafka.common.security.{module} required username={user} password={password};"
        )
    return options


def create(settings: Settings, connector: Connector | None = None) -> list[str]:
    """Make the topics that the connector writes, unless they are there, and return the names of those made.

    Raises Failure if its topic is there with fewer partitions than ``settings.topic_partitions``.
    """
    connector = connector or connectors.load(settings)
    # One partition of offsets: a transaction of exactly-once writes a marker to each that it touches.
    partitions = {connector.topic: settings.topic_partitions, connector.offsets_topic: 1}
    wanted = [
        NewTopic(name, partitions[name], settings.topic_replication, config=wanted)
        for name, wanted in wanted_configs(settings, connector).items()
    ]
    made = []
    admin = _admin(settings)  # held: a client that is let go of ends its calls
    for name, future in admin.create_topics(wanted, operation_timeout=TIMEOUT_S, request_timeout=TIMEOUT_S).items():
        try:
            future.result()
            made.append(name)
        except KafkaException as error:
            if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise _unreachable(settings, error) from error
    found = describe(settings, connector.topic)
    if found.partitions < settings.topic_partitions:
        raise Failure(
            f"topic {found.name} has {found.partitions} partitions and {settings.topic_partitions} are wanted",
            "set OUTBOX_TOPIC_PARTITIONS to what it has: adding partitions breaks the order of each key",
        )
    return made


def wanted_configs(settings: Settings, connector: Connector | None = None) -> dict[str, dict[str, str]]:
    """By topic of the connector, the configuration that we make it with."""
    connector = connector or connectors.load(settings)
    events = {
        "cleanup.policy": "delete",
        "retention.ms": str(settings.topic_retention_hours * 3_600_000),
        # Retention counts from the arrival on the topic: by the event's own time, what a long outage or a first
        # snapshot brings late could be deleted before any sink has seen it.
        "message.timestamp.type": "LogAppendTime",
    }
    return {connector.topic: events, connector.offsets_topic: {"cleanup.policy": "compact"}}


def config(settings: Settings, name: str) -> dict[str, str]:
    """The configuration in force of a topic. Raises Failure if Kafka cannot be asked."""
    admin, resource = _admin(settings), ConfigResource(ConfigResource.Type.TOPIC, name)
    try:
        found = admin.describe_configs([resource], request_timeout=TIMEOUT_S)[resource].result()
    except KafkaException as error:
        raise _unreachable(settings, error) from error
    return {key: entry.value for key, entry in found.items()}


def describe(settings: Settings, name: str) -> Topic:
    """Look a topic up. Raises Failure if there is none of that name."""
    admin = _admin(settings)
    try:
        found = admin.describe_topics(TopicCollection([name]), request_timeout=TIMEOUT_S)[name].result()
    except KafkaException as error:
        if error.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
            raise Failure(f"there is no topic {name}", f"`{_maker(settings, name)}` makes it") from None
        raise _unreachable(settings, error) from error
    return Topic(name, str(found.topic_id), len(found.partitions))


def exists(settings: Settings, name: str) -> bool:
    """Whether there is a topic of that name. Raises Failure if Kafka cannot be asked."""
    try:
        return name in _admin(settings).list_topics(timeout=TIMEOUT_S).topics
    except KafkaException as error:
        raise _unreachable(settings, error) from error


def last_stable_offsets(settings: Settings, name: str) -> dict[int, int]:
    """By partition, the offset up to which everything is committed or aborted: what read_committed can see."""
    return {partition: last for partition, (_, last) in watermarks(settings, name).items()}


def first_offsets(settings: Settings, name: str) -> dict[int, int]:
    """By partition, the offset of the earliest record that the topic still has."""
    return {partition: first for partition, (first, _) in watermarks(settings, name).items()}


def offsets_since(settings: Settings, name: str, moment: datetime) -> dict[int, int]:
    """By partition that has any, the offset of the first record with a timestamp at or after a moment."""
    at_ms = round(moment.timestamp() * 1000)
    asked = [TopicPartition(name, number, at_ms) for number in range(describe(settings, name).partitions)]
    with _consumer(settings) as consumer:
        found = consumer.offsets_for_times(asked, timeout=TIMEOUT_S)
    return {place.partition: place.offset for place in found if place.offset >= 0}


def watermarks(settings: Settings, name: str) -> dict[int, tuple[int, int]]:
    """By partition, the first offset and the last stable one."""
    partitions = range(describe(settings, name).partitions)
    with _consumer(settings) as consumer:
        return {
            number: consumer.get_watermark_offsets(TopicPartition(name, number), timeout=TIMEOUT_S)
            for number in partitions
        }


def read(settings: Settings, name: str, within: Mapping[int, tuple[int, int]]) -> Iterator[Message]:
    """Every committed record of a topic within these first and last offsets; the last is excluded.

    In order within a partition. Transaction markers and aborted records are not among them. Raises Failure if the topic
    falls silent before its end.
    """
    end = {partition: last for partition, (first, last) in within.items() if first < last}
    with _consumer(settings) as consumer:
        consumer.assign([TopicPartition(name, partition, within[partition][0]) for partition in end])
        last_heard_at = time.monotonic()
        while end:
            messages = consumer.consume(num_messages=FETCH_RECORDS, timeout=POLL_S)
            if messages:
                last_heard_at = time.monotonic()
            elif time.monotonic() - last_heard_at > SILENCE_TIMEOUT_S:
                raise Failure(f"topic {name} gave no record for {SILENCE_TIMEOUT_S:.0f} s", "`outbox status`")
            for message in messages:
                error, partition, offset = message.error(), message.partition(), message.offset()
                if error is not None:
                    raise KafkaException(error)
                if partition in end and offset is not None and offset < end[partition]:
                    yield message
            # The end may be a marker or an aborted record, which nobody is given: ask the consumer where it stands.
            for place in consumer.position([TopicPartition(name, partition) for partition in end]):
                if place.offset >= end[place.partition]:
                    del end[place.partition]


def _maker(settings: Settings, name: str) -> str:
    """The command that makes a topic."""
    found = [one for one in connectors.others(settings) if one.topic == name]
    return (found or [connectors.load(settings)])[0].command("apply")


@contextmanager
def _consumer(settings: Settings) -> Iterator[Consumer]:
    consumer = Consumer(
        {
            **client_config(settings),
            "group.id": f"outbox-{uuid.uuid4()}",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "fetch.wait.max.ms": 20,
        }
    )
    try:
        yield consumer
    except KafkaException as error:
        raise _unreachable(settings, error) from error
    finally:
        consumer.close()


def _admin(settings: Settings) -> AdminClient:
    return AdminClient({**client_config(settings), "log_level": 0})


def _unreachable(settings: Settings, error: KafkaException) -> Failure:
    return Failure(f"Kafka at {settings.kafka_bootstrap}: {error.args[0].str()}", "`outbox up` starts the embedded one")


def _quoted(word: str) -> str:
    escaped = word.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
