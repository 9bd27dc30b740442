"""Rows that sinks keep, written by SQL: so tests of retention need no sink."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import UTC, date, datetime, timedelta
from random import Random
from typing import Any
from uuid import UUID

from psycopg2 import extensions

from outbox.base import database
from outbox.base.database import connect
from outbox.base.settings import Role, Settings, SinkRole
from outbox.sink.decoding.values import days
from outbox.sink.remembering import strategy
from tests.support.made_events import uuid7
from tests.support.topic_reader import topic_of

RANDOM = Random(7)  # noqa: S311


def ago(days: int) -> date:
    """The day (UTC) of so many days ago."""
    return datetime.now(UTC).date() - timedelta(days=days)


def aged(days: int) -> str:
    return id_of(datetime.now(UTC) - timedelta(days=days))


def id_of(moment: datetime) -> str:
    return uuid7(RANDOM, round(moment.timestamp() * 1000))


def partition(days: int) -> str:
    """The partition of the ids of so many days ago."""
    return f"processed_events_{ago(days):%Y%m%d}"


@contextmanager
def cursor_of(settings: Settings, role: Role = SinkRole.WRITER) -> Iterator[extensions.cursor]:
    """A cursor of one transaction."""
    with closing(connect(settings, role)) as connection, connection, connection.cursor() as cursor:
        yield cursor


def query(
    settings: Settings, statement: str, *parameters: object, role: Role = SinkRole.OWNER
) -> list[tuple[Any, ...]]:
    """The rows of a statement, which is committed."""
    return database.query(settings, role, statement, parameters or None)


def start(settings: Settings, *sinks: str) -> None:
    """Sinks that have run."""
    add = "INSERT INTO sinks (name, epoch) SELECT unnest(%s), 1 ON CONFLICT DO NOTHING"
    query(settings, add, [*sinks], role=SinkRole.WRITER)


def remember(settings: Settings, *event_ids: str, sink: str = "dedup") -> int:
    """Apply events as strategy `dedup` does; returns how many were new."""
    start(settings, sink)
    with closing(connect(settings, SinkRole.WRITER)) as connection:
        strategy.ensure_partitions(connection, days(event_ids))
    add = """
    INSERT INTO processed_events (sink, event_id)
    SELECT %s, id FROM unnest(%s::uuid[]) AS id WHERE id >= (SELECT horizon FROM dedup_horizon)
        ON CONFLICT DO NOTHING RETURNING 1
    """
    return len(query(settings, add, sink, [*event_ids], role=SinkRole.WRITER))


def land(settings: Settings, *event_ids: str, sink: str = "merge") -> None:
    """Events that strategy `merge` keeps."""
    start(settings, sink)
    add = "INSERT INTO landed_events (sink, event_id, event) SELECT %s, id, '{}' FROM unnest(%s::uuid[]) AS id"
    query(settings, add, sink, [*event_ids], role=SinkRole.WRITER)


def set_aside(
    settings: Settings,
    identity: str,
    event_id: str | None = None,
    *,
    status: str = "open",
    seen_days_ago: int = 100,
    sink: str = "dedup",
    topic: str | None = None,
    is_event: bool = False,
) -> None:
    """A dead letter of a valid event, or of an unreadable record."""
    start(settings, sink)
    add = """
    INSERT INTO dead_letters (sink, identity, topic, topic_id, partition, "offset", event_id, reason, detail, status,
                              last_seen_at, is_event)
    VALUES (%s, %s, %s, 'x', 0, 0, %s, 'test', '', %s, now() - make_interval(days => %s), %s)
    """
    values = (sink, identity, topic or topic_of(settings), event_id, status, seen_days_ago, is_event)
    query(settings, add, *values, role=SinkRole.WRITER)


def stand(settings: Settings, sink: str, topic: str, topic_id: str, *, partition: int = 0, offset: int = 0) -> None:
    """A position of a sink."""
    start(settings, sink)
    add = "INSERT INTO positions (sink, topic, partition, topic_id, next_offset) VALUES (%s, %s, %s, %s, %s)"
    query(settings, add, sink, topic, partition, topic_id, offset, role=SinkRole.WRITER)


def names(settings: Settings) -> list[str]:
    """The partitions of processed_events, the oldest first."""
    return [name for (name,) in query(settings, "SELECT name FROM processed_partitions ORDER BY bound")]


def landed(settings: Settings) -> set[str]:
    """The events in landed_events."""
    return {event_id for (event_id,) in query(settings, "SELECT event_id::text FROM landed_events")}


def dead_letters(settings: Settings) -> set[str]:
    return {identity for (identity,) in query(settings, "SELECT identity FROM dead_letters")}


def horizon(settings: Settings) -> UUID:
    [(found,)] = query(settings, "SELECT horizon::text FROM dedup_horizon")
    return UUID(found)


def spread(years: int, count: int) -> Sequence[date]:
    """So many distinct days, up to today."""
    return [ago(number * years * 365 // count) for number in range(count)]


def has_waiting(settings: Settings, mode: str = "%") -> bool:
    """Whether a session of the sink database waits for an advisory lock, in this mode or in any."""
    waiting = """
    SELECT FROM pg_locks WHERE locktype = 'advisory' AND NOT granted AND mode LIKE %s
       AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
    """
    return bool(query(settings, waiting, mode))
