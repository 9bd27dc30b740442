"""The Kafka topics: how clients reach the brokers, which topic we make, how far they are committed."""

from __future__ import annotations

import uuid
from typing import NamedTuple

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from outbox.errors import Failure
from outbox.settings import Settings

TIMEOUT_S = 10.0


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


def create(settings: Settings) -> list[str]:
    """Make the events topic, unless it is there, and return the names of those made.

    Raises Failure if it is there with fewer partitions than ``settings.topic_partitions``.
    """
    wanted = [
        NewTopic(
            settings.topic,
            num_partitions=settings.topic_partitions,
            replication_factor=settings.topic_replication,
        )
    ]
    made = []
    admin = _admin(settings)  # held: a client that is let go of ends its calls
    for name, future in admin.create_topics(wanted, operation_timeout=TIMEOUT_S).items():
        try:
            future.result(TIMEOUT_S)
            made.append(name)
        except KafkaException as error:
            if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise _unreachable(settings, error) from error
    found = describe(settings, settings.topic)
    if found.partitions < settings.topic_partitions:
        raise Failure(
            f"topic {found.name} has {found.partitions} partitions and {settings.topic_partitions} are wanted",
            "set OUTBOX_TOPIC_PARTITIONS to what it has: adding partitions breaks the order of each key",
        )
    return made


def describe(settings: Settings, name: str) -> Topic:
    """Look a topic up. Raises Failure if there is none of that name."""
    admin = _admin(settings)
    try:
        found = admin.describe_topics(TopicCollection([name]), request_timeout=TIMEOUT_S)[name].result()
    except KafkaException as error:
        if error.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
            raise Failure(f"there is no topic {name}", "`outbox connect apply` makes it") from None
        raise _unreachable(settings, error) from error
    return Topic(name, str(found.topic_id), len(found.partitions))


def last_stable_offsets(settings: Settings, name: str) -> dict[int, int]:
    """By partition, the offset up to which everything is committed or aborted: what read_committed can see."""
    return {partition: last for partition, (_, last) in _watermarks(settings, name).items()}


def first_offsets(settings: Settings, name: str) -> dict[int, int]:
    """By partition, the offset of the earliest record that the topic still has."""
    return {partition: first for partition, (first, _) in _watermarks(settings, name).items()}


def _watermarks(settings: Settings, name: str) -> dict[int, tuple[int, int]]:
    consumer = Consumer(
        {**client_config(settings), "group.id": f"outbox-{uuid.uuid4()}", "isolation.level": "read_committed"}
    )
    try:
        partitions = range(describe(settings, name).partitions)
        return {
            number: consumer.get_watermark_offsets(TopicPartition(name, number), timeout=TIMEOUT_S)
            for number in partitions
        }
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
