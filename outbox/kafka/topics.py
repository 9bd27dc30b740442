"""The Kafka topics: how clients reach the brokers, which topic we make, how far they are committed."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Literal, NamedTuple

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource  # type: ignore[attr-defined]  # not said in its stubs
from confluent_kafka.cimpl import NewTopic

from outbox.base.errors import Failure
from outbox.base.settings import Settings
from outbox.base.wait import wait_for
from outbox.relay import connectors
from outbox.relay.connectors import Connector

TIMEOUT_S = 10.0
FETCH_RECORDS = 10_000
POLL_S = 0.1  # consume() waits so long for a full list
SILENCE_TIMEOUT_S = 30.0
IsolationLevel = Literal["read_committed", "read_uncommitted"]
MARKERS_RETENTION_MS = 24 * 3_600_000
HOPELESS = {KafkaError._AUTHENTICATION, KafkaError._SSL}
MISSED = object()


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
    # One partition of the others: a transaction of exactly-once writes a marker to each that it touches.
    wanted = [
        NewTopic(
            name,
            settings.topic_partitions if name == connector.topic else 1,
            settings.topic_replication,
            config=wanted,
        )
        for name, wanted in wanted_configs(settings, connector).items()
    ]
    made = []
    admin = _Admin(settings)
    asked = admin.client.create_topics(wanted, operation_timeout=TIMEOUT_S, request_timeout=TIMEOUT_S)
    for name, future in asked.items():
        if admin.answer(future, but=KafkaError.TOPIC_ALREADY_EXISTS) is not MISSED:
            made.append(name)
    for name in asked:  # the controller has answered; brokers hear of it a moment later
        wait_for(f"the brokers to know topic {name}", partial(exists, settings, name), timeout_s=TIMEOUT_S)
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
    wanted = {connector.topic: events, connector.offsets_topic: {"cleanup.policy": "compact"}}
    if connector.is_outbox:
        wanted[markers_topic(settings)] = {"cleanup.policy": "delete", "retention.ms": str(MARKERS_RETENTION_MS)}
    return wanted


def config(settings: Settings, name: str) -> dict[str, str]:
    """The configuration in force of a topic. Raises Failure if Kafka cannot be asked."""
    admin, resource = _Admin(settings), ConfigResource(ConfigResource.Type.TOPIC, name)
    found = admin.answer(admin.client.describe_configs([resource], request_timeout=TIMEOUT_S)[resource])
    return {key: entry.value for key, entry in found.items()}


def markers_topic(settings: Settings) -> str:
    """The topic of the markers that `outbox prune` sends through the relay; nobody reads it."""
    return f"{settings.connector}.markers"


def describe(settings: Settings, name: str) -> Topic:
    """Look a topic up. Raises Failure if there is none of that name."""
    found = _look_up(settings, name)
    if found is MISSED:
        raise Failure(f"there is no topic {name}", f"`{_maker(settings, name)}` makes it")
    return Topic(name, str(found.topic_id), len(found.partitions))


def exists(settings: Settings, name: str) -> bool:
    """Whether there is a topic of that name. Raises Failure if Kafka cannot be asked."""
    return _look_up(settings, name) is not MISSED


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


def high_watermarks(settings: Settings, name: str) -> dict[int, int]:
    """By partition, the offset behind the last record that the brokers hold, in a transaction still open or not."""
    return {partition: last for partition, (_, last) in watermarks(settings, name, "read_uncommitted").items()}


def dropped_until(settings: Settings) -> datetime | None:
    """The latest moment of which the events' topic may have dropped a record; None if it has all it was ever given.

    What a partition has dropped came before the first record that it still has, and longer ago than it keeps records.
    """
    partial = {number: marks for number, marks in watermarks(settings, settings.topic).items() if marks[0] > 0}
    if not partial:
        return None
    expired = datetime.now(UTC) - timedelta(hours=settings.topic_retention_hours)
    firsts = [next(read(settings, settings.topic, {number: marks}), None) for number, marks in partial.items()]
    return max(min(expired, _time(first)) if first else expired for first in firsts)


def watermarks(
    settings: Settings, name: str, isolation_level: IsolationLevel = "read_committed"
) -> dict[int, tuple[int, int]]:
    """By partition, the first offset and the last one that a reader of this isolation level sees: the last stable one,
    or else the end.
    """
    partitions = range(describe(settings, name).partitions)
    with _consumer(settings, isolation_level) as consumer:
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
                raise Failure(
                    f"topic {name} gave no record for {SILENCE_TIMEOUT_S:.0f} s", "`outbox doctor` looks at Kafka"
                )
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


def _look_up(settings: Settings, name: str) -> Any:
    admin = _Admin(settings)
    asked = admin.client.describe_topics(TopicCollection([name]), request_timeout=TIMEOUT_S)[name]
    return admin.answer(asked, but=KafkaError.UNKNOWN_TOPIC_OR_PART)


def _maker(settings: Settings, name: str) -> str:
    """The command that makes a topic."""
    found = [one for one in connectors.others(settings) if one.topic == name]
    return (found or [connectors.load(settings)])[0].command("apply")


@contextmanager
def _consumer(settings: Settings, isolation_level: IsolationLevel = "read_committed") -> Iterator[Consumer]:
    consumer = Consumer(
        {
            **client_config(settings),
            "group.id": f"outbox-{uuid.uuid4()}",
            "isolation.level": isolation_level,
            "enable.auto.commit": False,
            "fetch.wait.max.ms": 20,
            "log_level": 0,  # what goes wrong is raised; closed while it logs in, it would print that as an error
        }
    )
    try:
        yield consumer
    except KafkaException as error:
        raise _unreachable(settings, error.args[0]) from error
    finally:
        consumer.close()


def _time(message: Message) -> datetime:
    return datetime.fromtimestamp(message.timestamp()[1] / 1000, UTC)


class _Admin:
    """An admin client that does not wait for what waiting does not mend.

    librdkafka tries again whatever happens, and says in the end that it took too long. What happened it tells aside.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        told: list[
            KafkaError
        ] = []  # nothing of ours is in the callback: a circle would keep the client's threads alive
        self._told = told
        config: dict[str, Any] = {**client_config(settings), "log_level": 0, "error_cb": told.append}
        try:
            self.client = AdminClient(config)
        except KafkaException as error:  # a CA file that is none
            raise _unreachable(settings, error.args[0]) from None

    def answer(self, asked: Future[Any], but: int | None = None) -> Any:
        """The answer to a request, or MISSED if it is an error of this code. Raises Failure for any other."""
        while not asked.done():
            self.client.poll(POLL_S)
            for error in self._told:
                if error.code() in HOPELESS:
                    raise _unreachable(self._settings, error)
        try:
            return asked.result()
        except KafkaException as error:
            answered: KafkaError = error.args[0]
            if answered.code() == but:
                return MISSED
            told = [each for each in self._told if each.code() != KafkaError._ALL_BROKERS_DOWN]
            is_late = answered.code() == KafkaError._TIMED_OUT
            raise _unreachable(self._settings, told[-1] if is_late and told else answered) from error


def _unreachable(settings: Settings, error: KafkaError) -> Failure:
    remedy = "start it, or correct OUTBOX_KAFKA_BOOTSTRAP and OUTBOX_KAFKA_SECURITY_PROTOCOL"
    match error.code():
        case KafkaError._AUTHENTICATION:
            remedy = "correct OUTBOX_KAFKA_USERNAME, OUTBOX_KAFKA_PASSWORD and OUTBOX_KAFKA_SASL_MECHANISM"
        case KafkaError._SSL | KafkaError._INVALID_ARG:
            remedy = (
                "correct OUTBOX_KAFKA_CAFILE, OUTBOX_KAFKA_SECURITY_PROTOCOL, or the host in OUTBOX_KAFKA_BOOTSTRAP: "
                "one that the brokers' certificates name"
            )
        case KafkaError.TOPIC_AUTHORIZATION_FAILED | KafkaError.CLUSTER_AUTHORIZATION_FAILED:
            remedy = f"grant it to {settings.kafka_username or 'the client'} in Kafka's access control lists"
        case _ if "refused" in error.str() and settings.is_embedded("kafka_bootstrap"):
            remedy = "`outbox up` starts the embedded one"
    return Failure(f"Kafka at {settings.kafka_bootstrap}: {error.str()}", remedy)


def _quoted(word: str) -> str:
    escaped = word.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
