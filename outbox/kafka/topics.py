"""Kafka topics: create them, describe them, and look up their offsets."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple

from confluent_kafka import KafkaError, TopicCollection, TopicPartition
from confluent_kafka.admin import ConfigResource  # type: ignore[attr-defined]  # missing in its stubs
from confluent_kafka.cimpl import NewTopic

from outbox.base.errors import Failure
from outbox.base.settings import Settings
from outbox.base.wait import wait_for
from outbox.kafka.clients import MISSING, REQUEST_TIMEOUT_S, Admin, IsolationLevel, consumer, request_timeout_s


class Topic(NamedTuple):
    """A topic as the brokers know it. ``id`` changes when a topic is deleted and created again with the same name."""

    name: str
    id: str
    partitions: int


class TopicSpec(NamedTuple):
    """A topic to create: with so many partitions and this configuration."""

    name: str
    partitions: int
    config: dict[str, str]


def create(settings: Settings, specs: Sequence[TopicSpec]) -> list[str]:
    """Create the topics that do not exist, and return their names. An existing topic is not changed.

    Raises Failure if an existing topic has fewer partitions than its spec.
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
    for spec in specs:
        # The controller has answered; the brokers learn of the topic a moment later.
        wait_for(
            f"the brokers to know topic {spec.name}", partial(exists, settings, spec.name), timeout_s=REQUEST_TIMEOUT_S
        )
        _require_partitions(spec, describe(settings, spec.name))
    return created


def config(settings: Settings, name: str) -> dict[str, str]:
    """The effective configuration of a topic. Raises Failure if Kafka is unavailable."""
    admin, resource = Admin(settings), ConfigResource(ConfigResource.Type.TOPIC, name)
    found = admin.result(admin.client.describe_configs([resource], request_timeout=request_timeout_s())[resource])
    return {key: entry.value for key, entry in found.items()}


def describe(settings: Settings, name: str) -> Topic:
    """Look up a topic. Raises Failure if it does not exist."""
    found = _look_up(settings, name)
    if found is MISSING:
        raise Failure(
            f"there is no topic {name}", "`outbox connect apply` creates a connector's topics", code="topic-missing"
        )
    return Topic(name, str(found.topic_id), len(found.partitions))


def exists(settings: Settings, name: str) -> bool:
    """Whether the topic exists. Raises Failure if Kafka is unavailable."""
    return _look_up(settings, name) is not MISSING


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
        found = client.offsets_for_times(query, timeout=request_timeout_s())
    return {place.partition: place.offset for place in found if place.offset >= 0}


def watermarks(
    settings: Settings, name: str, isolation_level: IsolationLevel = "read_committed"
) -> dict[int, tuple[int, int]]:
    """Per partition, the first offset and the end that a reader of this isolation level sees.

    The end is the last stable offset for read_committed, and the high watermark for read_uncommitted.
    """
    partitions = range(describe(settings, name).partitions)
    with consumer(settings, isolation_level) as client:
        return {
            number: client.get_watermark_offsets(TopicPartition(name, number), timeout=request_timeout_s())
            for number in partitions
        }


def _look_up(settings: Settings, name: str) -> Any:
    admin = Admin(settings)
    request = admin.client.describe_topics(TopicCollection([name]), request_timeout=request_timeout_s())[name]
    return admin.result(request, missing=KafkaError.UNKNOWN_TOPIC_OR_PART)


def _require_partitions(spec: TopicSpec, found: Topic) -> None:
    if found.partitions < spec.partitions:
        raise Failure(
            f"topic {found.name} has {found.partitions} partitions; {spec.partitions} are required",
            f"set OUTBOX_TOPIC_PARTITIONS to {found.partitions}: more partitions would break the order of each key",
            code="topic-partitions",
        )
