"""Rows put into the outbox as a service puts them: one by one, or by a writer that never stops."""

from __future__ import annotations

import json
import random
import threading
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from typing import NamedTuple, TypeVar

import psycopg2
from psycopg2 import extensions
from psycopg2.extras import execute_values

from outbox.base.database import connect
from outbox.base.errors import Failure
from outbox.base.settings import Settings, SourceRole
from outbox.migrations import declared
from tests import items

INSERT = "INSERT INTO outbox (aggregatetype, aggregateid, type, payload, traceparent, schema_version) VALUES %s"


class Row(NamedTuple):
    """A row for the outbox table; the database adds id and time."""

    aggregatetype: str
    aggregateid: str
    type: str
    payload: str
    traceparent: str | None = None
    schema_version: int = 1


def row(key: str | None = None, version: int = 1, quantity: int = 5, traceparent: str | None = None) -> Row:
    """A row as the service writes it."""
    key = key or str(uuid.uuid4())
    payload = items.payload(str(uuid.uuid4()), key, quantity, version, total_after=quantity * version)
    return Row(items.AGGREGATE, key, items.type_of(quantity), json.dumps(payload), traceparent)


def insert(settings: Settings, *rows: Row) -> None:
    """Each row in a transaction of its own, as the service's role."""
    with closing(connect(settings, SourceRole.APP)) as connection:
        connection.autocommit = True
        with connection.cursor() as cursor:
            for each in rows:
                execute_values(cursor, INSERT, [each])


def remove_guard(settings: Settings) -> None:
    """Let the outbox take events that are not declared, as before a guard was there."""
    with closing(connect(settings, SourceRole.OWNER)) as connection, connection, connection.cursor() as cursor:
        cursor.execute(f"ALTER TABLE outbox DROP CONSTRAINT {declared.NAME}")


def ids(settings: Settings) -> list[str]:
    """The events in the outbox table, the oldest first."""
    with closing(connect(settings, SourceRole.CDC)) as connection, connection.cursor() as cursor:
        cursor.execute("SELECT id FROM outbox ORDER BY id")
        return [found for (found,) in cursor]


@contextmanager
def unfinished_transaction(settings: Settings) -> Iterator[None]:
    """While it is open, each slot keeps the log from where it began: a connector can go back to what came after.

    Without it the server's snapshot, every 15 s, may let a slot release what a connector with an older offset still
    needs: `outbox connect apply` refuses then (code slot-released).
    """
    with closing(connect(settings, SourceRole.OWNER)) as connection, connection.cursor() as cursor:
        cursor.execute("SELECT pg_logical_emit_message(true, 'test', '')")
        yield


PAUSE_S = 0.005  # between transactions: a load, not a flood that the relay could not keep up with


class Writer(threading.Thread):
    """Writes events all the time: small transactions of random size on random keys, as the service's role.

    A database that is away is waited for; whether the transaction under way then was committed is not known to it, so
    what counts is what the table holds.
    """

    def __init__(self, settings: Settings, seed: int, pause_s: float = PAUSE_S, keys: int = 40) -> None:
        super().__init__(name="writer", daemon=True)
        print(f"seed of the writer: {seed}")  # noqa: T201
        self.random = random.Random(seed)  # noqa: S311
        self.keys = [str(uuid.UUID(int=self.random.getrandbits(128))) for _ in range(keys)]
        self.committed = 0
        self.interruptions = 0
        self._settings, self._pause_s = settings, pause_s
        self._versions: Counter[str] = Counter()
        self._halt = threading.Event()

    def run(self) -> None:
        while not self._halt.is_set():
            try:
                with closing(connect(self._settings, SourceRole.APP)) as connection:
                    while not self._halt.is_set():
                        self.committed += self.write(connection)
                        self._halt.wait(self._pause_s)
            except (psycopg2.OperationalError, psycopg2.InterfaceError, Failure):
                self.interruptions += 1
                self._halt.wait(0.1)

    def write(self, connection: extensions.connection) -> int:
        """Write some events, and commit. Returns how many."""
        keys = self.random.choices(self.keys, k=self.random.randint(1, 20))
        with connection, connection.cursor() as cursor:
            execute_values(cursor, INSERT, [row(key, version=self.next_version(key)) for key in keys])
        return len(keys)

    def next_version(self, key: str) -> int:
        """The version of the next event of a key."""
        self._versions[key] += 1
        return self._versions[key]

    def halt(self) -> None:
        """End after the transaction under way."""
        self._halt.set()
        self.join(60)
        assert not self.is_alive()


W = TypeVar("W", bound=Writer)


@contextmanager
def at_work(writer: W) -> Iterator[W]:
    """A writer at work until the end of the block."""
    writer.start()
    try:
        yield writer
    finally:
        writer.halt()


def writing(settings: Settings, seed: int, pause_s: float = PAUSE_S) -> AbstractContextManager[Writer]:
    """A writer at work, its seed printed. ``pause_s`` is between two transactions."""
    return at_work(Writer(settings, seed, pause_s))
