"""The whole chain for one test: its own databases, topic, connector and slot on the session's stack."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from confluent_kafka.admin import AdminClient

from outbox.base.settings import Settings
from outbox.kafka import topics
from outbox.relay import connect
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
    topics.create(settings)
    yield settings
    admin = AdminClient(topics.client_config(settings))
    for future in admin.delete_topics([*topics.wanted_configs(settings)]).values():
        future.result(10)


@contextmanager
def relaying(settings: Settings) -> Iterator[None]:
    """A connector from the ledger to the topic, removed at the end with its slot."""
    connect.apply(settings)
    yield
    connect.remove(settings, forget=True)
