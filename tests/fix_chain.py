"""The whole chain for one test: its own databases, topic, connector and slot on the session's stack."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from confluent_kafka.admin import AdminClient

from outbox import connect, topics
from outbox.settings import Settings
from outbox.stack.stack import Stack


@pytest.fixture
def topic(databases: Settings, stack: Stack) -> Iterator[Settings]:
    """Settings with a topic and a connector's name of this test alone; the topics are made, the connector is not."""
    suffix = databases.ledger_dbname.rpartition("_")[2]
    settings = stack.settings.model_copy(
        update={
            "ledger_dbname": databases.ledger_dbname,
            "balances_dbname": databases.balances_dbname,
            "topic": f"ledger.events.{suffix}",
            "connector": f"outbox_{suffix}",
            "sink_checkpoints": (stack.home / "checkpoints" / suffix).as_uri(),
        }
    )
    topics.create(settings)
    yield settings
    admin = AdminClient(topics.client_config(settings))
    for future in admin.delete_topics([settings.topic, f"{settings.connector}.offsets"]).values():
        future.result(10)


@pytest.fixture
def chain(topic: Settings) -> Iterator[Settings]:
    """Settings of a chain whose connector relays from the test's ledger to the test's topic."""
    connect.apply(topic)
    yield topic
    connect.remove(topic, forget=True)
