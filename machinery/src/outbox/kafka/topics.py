"""Kafka topics: create them, describe them, and look up their offsets."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple, TypeVar

from confluent_kafka import KafkaError, KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource  # type: ignore[attr-defined]  # missing in its stubs
from confluent_kafka.cimpl import NewTopic

from outbox.base.errors import Failure
from outbox.base.settings import Settings
from outbox.base.wait import WaitTimeoutError, wait_for
from outbox.kafka.clients import (
    MISSING,
    REQUEST_TIMEOUT_S,
    Admin,
    IsolationLevel,
    client_config,
    consumer,
    kafka_errors,
    request_timeout_s,
)
from outbox.kafka.spec import TopicSpec

T = TypeVar("T")
PARTITIONS_OPTION = "`partitions` in aggregate.toml, or OUTBOX_TOPIC_PARTITIONS,"  # says how many a topic has
IDS_EVERY_S = 5.0
# What a broker answers while a leader is elected, and for a moment after a topic was created: it knows the topic before
# it leads its partitions.
ELECTING = {
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.UNKNOWN_TOPIC_OR_PART,
}


class Topic(NamedTuple):
    """A topic as the brokers know it. ``id`` changes when a topic is deleted and created again with the same name."""

    name: str
    id: str
    partitions: int


class TopicIds:
    """The ids of topics while somebody reads them: a topic that is deleted and made again has another one.

    A reader asks for offsets by the name of a topic, so it would go on at its offset in the new topic, and skip what
    that has below. One small request every few seconds asks for all ids, and nobody waits for the answer.
    """

    def __init__(self, settings: Settings, names: Collection[str]) -> None:
        self._names = TopicCollection([*names])
        with kafka_errors(settings):
            self._client = AdminClient({**client_config(settings), "log_level": 0})
        self._asked: Mapping[str, Future[Any]] = {}
        self._due_at = time.monotonic() + IDS_EVERY_S

    def look(self) -> dict[str, str]:
        """The ids that have come since the last look, by name. A topic that does not exist now is left out, and so are
        all of them if Kafka does not answer.
        """
        found = {}
        if self._asked and all(request.done() for request in self._asked.values()):
            found = {name: str(one.result().topic_id) for name, one in self._asked.items() if one.exception() is None}
            self._asked = {}
        if not self._asked and time.monotonic() >= self._due_at:
            self._due_at = time.monotonic() + IDS_EVERY_S
            self._asked = self._client.describe_topics(self._names, request_timeout=request_timeout_s())
        return found


def create(settings: Settings, specs: Sequence[TopicSpec]) -> list[str]:
    """Create the topics that do not exist, and return their names. An existing topic is not changed.

    Raises Failure if an existing topic has fewer partitions than its spec, or if Kafka refuses a name.
    """
    admin = Admin(settings)
    requests = admin.client.create_topics(
        [NewTopic(spec.name, spec.partitions, settings.topic_replication, config=spec.config) for spec in specs],
        operation_timeout=request_timeout_s(),
        request_timeout=request_timeout_s(),
    )
    created = [
        name
        for name, request in requests.items()
        if admin.result(request, missing=KafkaError.TOPIC_ALREADY_EXISTS) is not MISSING
    ]
    names = [spec.name for spec in specs]
    # The controller has answered; the brokers learn of the topics a moment later.

    def known() -> dict[str, Topic] | None:
        found = existing(settings, names)
        return found if len(found) == len(names) else None

    found = wait_for(f"the brokers to know {', '.join(names)}", known, timeout_s=REQUEST_TIMEOUT_S)
    for spec in specs:
        partitions = found[spec.name].partitions
        if partitions < spec.partitions:
            raise Failure(
                f"topic {spec.name} has {partitions} partitions; {spec.partitions} are required",
                f"set {PARTITIONS_OPTION} to {partitions}: more partitions would break the order of each key",
                code="topic-partitions",
            )
    return created


def config(settings: Settings, name: str) -> dict[str, str]:
    """The effective configuration of a topic. Raises Failure if Kafka is unavailable."""
    admin, resource = Admin(settings), ConfigResource(ConfigResource.Type.TOPIC, name)
    found = admin.result(admin.client.describe_configs([resource], request_timeout=request_timeout_s())[resource])
    return {key: entry.value for key, entry in found.items()}


def describe(settings: Settings, name: str) -> Topic:
    """Look up a topic. Raises Failure if it does not exist."""
    found = existing(settings, [name]).get(name)
    if found is None:
        raise missing(name)
    return found


def missing(name: str) -> Failure:
    """The failure of a reader whose topic does not exist."""
    return Failure(
        f"there is no topic {name}", "`outbox connect apply` creates a connector's topics", code="topic-missing"
    )


def exists(settings: Settings, name: str) -> bool:
    return bool(existing(settings, [name]))


def existing(settings: Settings, names: Collection[str]) -> dict[str, Topic]:
    """The topics that exist, by name. Raises Failure if Kafka is unavailable."""
    if not names:
        return {}
    admin = Admin(settings)
    requests = admin.client.describe_topics(TopicCollection([*names]), request_timeout=request_timeout_s())
    found = {
        name: admin.result(request, missing=KafkaError.UNKNOWN_TOPIC_OR_PART) for name, request in requests.items()
    }
    return {
        name: Topic(name, str(one.topic_id), len(one.partitions)) for name, one in found.items() if one is not MISSING
    }


def last_stable_offsets(settings: Settings, name: str) -> dict[int, int]:
    """Per partition, the offset up to which everything is committed or aborted: what read_committed can see."""
    return {partition: last for partition, (_, last) in watermarks(settings, name).items()}


def first_offsets(settings: Settings, name: str) -> dict[int, int]:
    """Per partition, the offset of the earliest record that the topic still has."""
    return {partition: first for partition, (first, _) in watermarks(settings, name).items()}


def high_watermarks(settings: Settings, name: str) -> dict[int, int]:
    """Per partition, the offset after the last record of the brokers, also inside an open transaction."""
    return {partition: last for partition, (_, last) in watermarks(settings, name, "read_uncommitted").items()}


def offsets_since(settings: Settings, name: str, moment: datetime) -> dict[int, int]:
    """Per partition, the offset of the first record with a timestamp at or after a moment.

    A partition without such a record is left out.
    """
    at_ms = round(moment.timestamp() * 1000)
    query = [TopicPartition(name, number, at_ms) for number in range(describe(settings, name).partitions)]
    with consumer(settings) as client:
        found = ask_leaders(name, lambda: client.offsets_for_times(query, timeout=request_timeout_s()))
    return {place.partition: place.offset for place in found if place.offset >= 0}


def watermarks(
    settings: Settings, name: str, isolation_level: IsolationLevel = "read_committed"
) -> dict[int, tuple[int, int]]:
    """Per partition, the first offset and the end that a reader of this isolation level sees.

    The end is the last stable offset for read_committed, and the high watermark for read_uncommitted. Waits for the
    brokers to lead each partition. Raises Failure if one has no leader for long.
    """
    partitions = range(describe(settings, name).partitions)
    with consumer(settings, isolation_level) as client:

        def of(number: int) -> tuple[int, int] | None:
            return client.get_watermark_offsets(TopicPartition(name, number), timeout=request_timeout_s())

        return {number: ask_leaders(name, partial(of, number)) for number in partitions}


def wait_decided(settings: Settings, name: str, timeout_s: float) -> dict[int, int]:
    """Per partition, an offset behind everything written by now, below which no transaction is open.

    Raises WaitTimeoutError if a transaction does not end in time.
    """
    written = high_watermarks(settings, name)

    def decided() -> dict[int, int] | None:
        stable = last_stable_offsets(settings, name)
        return stable if all(stable[partition] >= end for partition, end in written.items()) else None

    return wait_for(f"the transactions on topic {name} to end", decided, timeout_s=timeout_s, poll_s=0.2)


def ask_leaders(name: str, ask: Callable[[], T | None]) -> T:
    def answer() -> T | None:
        try:
            return ask()
        except KafkaException as error:
            if error.args[0].code() in ELECTING:
                return None
            raise

    try:
        return wait_for(f"the brokers to lead topic {name}", answer, timeout_s=REQUEST_TIMEOUT_S)
    except WaitTimeoutError as error:
        raise Failure(str(error), "wait until all brokers are up again", code="kafka-unavailable") from error
