"""The whole chain for one test: its own databases, topic, connector and slot on the session's stack."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from confluent_kafka.admin import AdminClient

from outbox.base.settings import Settings
from outbox.kafka import topics
from outbox.kafka.clients import client_config, request_timeout_s
from outbox.relay import apply as relay
from outbox.relay import connectors
from outbox.stack.stack import Stack


@pytest.fixture
def topic(databases: Settings, stack: Stack) -> Iterator[Settings]:
    """Settings with a topic and a connector's name of this test alone; the topic is made, the connector is not."""
    with topic_of(databases, stack) as settings:
        yield settings


@pytest.fixture
def chain(topic: Settings) -> Iterator[Settings]:
    """Settings of a chain whose connector relays from the test's ledger to the test's topic."""
    with relaying(topic):
        yield topic


@pytest.fixture(scope="module")
def shared_chain(shared_databases: Settings, stack: Stack) -> Iterator[Settings]:
    """The same for the tests of a module that do not disturb each other: a connector of their own costs seconds."""
    with topic_of(shared_databases, stack) as settings, relaying(settings):
        yield settings


@contextmanager
def topic_of(databases: Settings, stack: Stack) -> Iterator[Settings]:
    """A topic for a pair of databases, deleted at the end."""
    suffix = databases.source_db_name.rpartition("_")[2]
    settings = stack.settings.model_copy(
        update={
            "source_db_name": databases.source_db_name,
            "sink_db_name": databases.sink_db_name,
            "topic": f"ledger.events.{suffix}",
            "connector": f"outbox_{suffix}",
            "sink_checkpoints": f"file://{stack.home}/checkpoints/{suffix}",
            "sink_lakehouse": f"file://{stack.home}/lakehouse/{suffix}",
        }
    )
    specs = connectors.topic_specs(settings)
    topics.create(settings, specs)
    yield settings
    admin = AdminClient(client_config(settings))
    for request in admin.delete_topics([spec.name for spec in specs]).values():
        request.result(request_timeout_s())


@contextmanager
def relaying(settings: Settings) -> Iterator[None]:
    """A connector from the ledger to the topic, removed at the end with its slot."""
    relay.apply(settings)
    yield
    relay.remove(settings, drop_slot=True)
