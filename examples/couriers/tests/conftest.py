"""A service that writes events of couriers, and the tables of the sinks in Cassandra."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest
from cassandra.cluster import EXEC_PROFILE_DEFAULT, Cluster, ExecutionProfile, Session
from cassandra.policies import RoundRobinPolicy
from outbox import Event, append
from sqlalchemy import Engine, text

from sinks import store

pytest_plugins = ["outbox_lab.testing.plugin", "outbox_lab.testing.fixtures.cassandra"]
ADDRESS = "127.0.0.1"
TABLES = Path("sinks/tables.cql").read_text().split(";")[:-1]
MOVE = """
INSERT INTO couriers (id, zone, parcels, version) VALUES (:id, :zone, :parcels, 1)
ON CONFLICT (id) DO UPDATE SET zone = :zone, parcels = :parcels, version = couriers.version + 1
RETURNING version
"""


class Node(Protocol):
    """The fixture `cassandra`."""

    port: int

    def start(self) -> None:
        """Start it and wait until it serves."""

    def kill(self) -> None:
        """End it as a crash would."""


class Service:
    """Writes a courier's row and event in one transaction."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def move(self, courier: str, zone: str, parcels: int) -> None:
        """Let a courier be in a zone, with so many parcels."""
        self._change("moved", courier, zone, parcels, {"name": "Ada", "zone": zone, "parcels": parcels})

    def sign_off(self, courier: str) -> None:
        """Let a courier, who is in a zone, leave."""
        self._change("signed_off", courier, None, 0, {})

    def _change(self, event: str, courier: str, zone: str | None, parcels: int, payload: dict[str, object]) -> None:
        with self._engine.begin() as connection:
            left = connection.scalar(text("SELECT zone FROM couriers WHERE id = :id"), {"id": courier})
            version = connection.scalar(text(MOVE), {"id": courier, "zone": zone, "parcels": parcels})
            payload |= {"courier": courier, "version": version} | ({"left_zone": left} if left else {})
            append(connection, Event("courier", courier, event, payload))


@pytest.fixture
def service(engine: Engine) -> Service:
    return Service(engine)


@pytest.fixture
def tables(cassandra: Node, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    """A session on empty tables of this test alone, for the sinks of this process and of those that it starts."""
    monkeypatch.setenv("CASSANDRA_HOSTS", ADDRESS)
    monkeypatch.setenv("CASSANDRA_PORT", str(cassandra.port))
    profiles = {EXEC_PROFILE_DEFAULT: ExecutionProfile(RoundRobinPolicy())}
    cluster = Cluster([ADDRESS], cassandra.port, protocol_version=5, execution_profiles=profiles)
    session = cluster.connect()
    for statement in TABLES:
        session.execute(statement)
    yield session
    store.session().execute("DROP KEYSPACE delivery")
    for one in {cluster, store.session().cluster}:
        one.shutdown()
    store.session.cache_clear()
    store.prepared.cache_clear()
