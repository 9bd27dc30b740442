"""The rights of a sink that writes to a topic: those that docs/topics.md lists do, and none of them is too many."""

from __future__ import annotations

import re
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import closing
from typing import Any

from confluent_kafka.admin import (  # type: ignore[attr-defined]  # missing in its stubs
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)

from outbox.base.settings import Settings
from outbox.kafka import topics
from outbox.kafka.clients import client_config
from outbox.kafka.spec import TopicSpec
from outbox_lab.stack.kafka import CLIENT
from outbox_lab.testing.failures import raises
from outbox_lab.testing.homes import Homes
from tests.support import topic_sinks
from tests.support.made_events import Event, nth_key, uuid7
from tests.support.paths import ROOT
from tests.support.secured import guarded_kafka
from tests.support.sink_process import RANDOM, Publisher
from tests.support.topic_reader import Log, topic_of
from tests.support.topic_sinks import catch_up, copies_of

PREFIXED = "groups that begin with"
TYPES = {
    "topic": ResourceType.TOPIC,
    "transactional id": ResourceType.TRANSACTIONAL_ID,
    "group": ResourceType.GROUP,
    PREFIXED: ResourceType.GROUP,
}
OPERATIONS = {
    "Read": AclOperation.READ,
    "Write": AclOperation.WRITE,
    "Describe": AclOperation.DESCRIBE,
    "DescribeConfigs": AclOperation.DESCRIBE_CONFIGS,
}


KAFKA = ("bootstrap", "security_protocol", "sasl_mechanism", "username", "password", "cafile")


def rights(settings: Settings) -> list[AclBinding]:
    """What docs/topics.md lists, and what reading the topic of the events needs, one operation each."""
    page = (ROOT / "docs" / "topics.md").read_text()
    name = f"{settings.topic_prefix}.copies"
    names = {"topic": [copies_of(settings)], "transactional id": [name, f"{name}.replay"], "group": [name]}
    names[PREFIXED] = ["outbox-"]
    found = []
    for kind, operations in re.findall(
        rf"^\| (topic|transactional id|group|{PREFIXED}) \| .* \| (`.*`) \|$", page, re.M
    ):
        found += [(kind, one, word) for one in names[kind] for word in re.findall(r"`(\w+)`", operations)]
    found += [("topic", topic_of(settings), word) for word in ("Read", "Describe")]
    return [right(*one) for one in found]


def right(kind: str, name: str, operation: str) -> AclBinding:
    pattern = ResourcePatternType.PREFIXED if kind == PREFIXED else ResourcePatternType.LITERAL
    return AclBinding(TYPES[kind], name, pattern, f"User:{CLIENT}", "*", OPERATIONS[operation], AclPermissionType.ALLOW)


def test_a_sink_needs_the_rights_of_the_page(databases: Settings, homes: Homes) -> None:
    with guarded_kafka(homes.new("rights")) as (limited, unlimited):
        both = [
            databases.replace(**{f"kafka_{name}": getattr(one, f"kafka_{name}") for name in KAFKA})
            for one in (limited, unlimited)
        ]
        settings, administrator = both
        topics.create(administrator, [TopicSpec(topic_of(settings), 1, {})])
        some = [Event(uuid7(RANDOM), nth_key(1), 1 + number, 1 + number) for number in range(3)]
        with topic_sinks.target_topics(administrator):
            publisher = Publisher(administrator)
            admin = AdminClient(client_config(administrator))
            granted = rights(settings)
            assert len(granted) == 13
            wait_all(admin.create_acls(granted))
            publisher.send(some[:1])
            catch_up(settings, "copies")
            needed = [
                right("topic", copies_of(settings), "Write"),
                right("topic", copies_of(settings), "DescribeConfigs"),
                right("transactional id", f"{settings.topic_prefix}.copies", "Write"),
                right("group", f"{settings.topic_prefix}.copies", "Read"),
            ]
            publisher.send(some[1:2])
            for one in needed:
                wait_all(admin.delete_acls([filter_of(one)]))
                with raises("kafka-not-authorized"):
                    catch_up(settings, "copies")
                wait_all(admin.create_acls([one]))
            catch_up(settings, "copies")
            with closing(Log(administrator, [copies_of(settings)])) as log:
                assert [record.id for record in log.read()] == [event.event_id for event in some[:2]]


def filter_of(one: AclBinding) -> AclBindingFilter:
    return AclBindingFilter(
        one.restype, one.name, one.resource_pattern_type, one.principal, one.host, one.operation, one.permission_type
    )


def wait_all(requests: Mapping[Any, Future[Any]]) -> None:
    for request in requests.values():
        request.result(30)
