"""Read the source: the events of the outbox table, and the totals that the domain offers, in one snapshot."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from typing import Any, NamedTuple

from psycopg2 import extensions, sql

from outbox.base.database import column_names, connect, database_errors
from outbox.base.settings import Role, Settings, SourceRole
from outbox.sink.records import RecordDecoder
from outbox.writing.contract import BIGINT_MAX, BIGINT_MIN

AGAIN = "run the command again"
FETCH_ROWS = 10_000
LATE_MS = 600_000  # longer than any transaction that writes events
DIGITS_MAX = 200  # of a number; the contract refuses longer ones
VIEW = "source_totals"
EVENTS = """
SELECT id, aggregateid, {version}, {quantity}, (extract(epoch FROM occurred_at) * 1000)::bigint
  FROM outbox
 WHERE occurred_at >= {since}
"""
BEFORE = "SELECT count(*), (extract(epoch FROM now()) * 1000)::bigint FROM outbox WHERE occurred_at < {since}"
SINCE = "to_timestamp({} / 1000.0) AT TIME ZONE 'UTC'"


class Written(NamedTuple):
    """An event of the outbox table."""

    event_id: bytes
    key: str
    version: int | None  # None if the events have none, or if this one has no valid one
    quantity: Decimal | None  # None if this event has no valid one; 0 if the events have none
    occurred_ms: int


@dataclass
class Source:
    """The source in one snapshot. ``totals`` or ``versions`` are None if no view ``source_totals`` has the column."""

    events: Iterable[Written] = ()  # read once; those since the moment that was asked for
    totals: Mapping[str, Decimal] | None = field(default_factory=dict)  # by key
    versions: Mapping[str, int] | None = field(default_factory=dict)  # by key, the version of its last event
    events_before: int = 0  # how many more events there are
    read_at_ms: int = 0


@contextmanager
def read(settings: Settings, decoder: RecordDecoder, since_ms: int = 0) -> Iterator[Source]:
    """The source, with its events since a moment, until the end of the block.

    Raises Failure if the database cannot be read.
    """
    since = sql.SQL(SINCE).format(sql.Literal(since_ms))
    with snapshot(settings, SourceRole.AUDITOR) as connection:
        with connection.cursor() as cursor:
            cursor.execute(sql.SQL(BEFORE).format(since=since))
            [(before, read_at_ms)] = cursor.fetchall()
        yield Source(_events(connection, decoder, since), *_totals(connection), before, read_at_ms)


@contextmanager
def snapshot(settings: Settings, role: Role) -> Iterator[extensions.connection]:
    """A connection that reads one snapshot. Raises Failure if the database refuses a query of the block."""
    with closing(connect(settings, role)) as connection:
        connection.set_session(isolation_level="REPEATABLE READ", readonly=True)
        with read_errors(connection, settings, role):
            yield connection


def read_errors(connection: extensions.connection, settings: Settings, role: Role) -> AbstractContextManager[None]:
    """Convert psycopg2 errors inside the block to Failure: the database of a role cannot be read."""
    return database_errors(connection, f"reading {settings.dsn(role)['dbname']}", "refused a query", AGAIN)


def rows(connection: extensions.connection, query: str | sql.Composable) -> Iterator[tuple[Any, ...]]:
    """The rows of a query that may be larger than memory."""
    with connection.cursor(name="check") as cursor:
        cursor.itersize = FETCH_ROWS
        cursor.execute(query)
        yield from cursor


def _events(connection: extensions.connection, decoder: RecordDecoder, since: sql.Composable) -> Iterator[Written]:
    is_optional = all(column.is_nullable for column in decoder.columns if column.name == decoder.quantity)
    query = sql.SQL(EVENTS).format(
        version=_property(decoder.version), quantity=_property(decoder.quantity), since=since
    )
    for event_id, key, version, quantity, occurred_ms in rows(connection, query):
        number = Decimal(0) if quantity is None and is_optional else _number(quantity)
        yield Written(uuid.UUID(event_id).bytes, key, _version(version), number, occurred_ms)


def _property(name: str | None) -> sql.Composable:
    return sql.SQL("NULL") if name is None else sql.SQL("payload ->> {}").format(sql.Literal(name))


def _version(text: str | None) -> int | None:
    """A version as the contract has it: a whole number of 64 bits; None if the property is none."""
    number = _number(text)
    if number is None or number != number.to_integral_value() or not BIGINT_MIN <= number <= BIGINT_MAX:
        return None
    return int(number)


def _number(text: str | None) -> Decimal | None:
    """The number of a property; None if it has none, as in a payload that breaks the contract."""
    try:
        number = None if text is None or len(text) > DIGITS_MAX else Decimal(text)
    except InvalidOperation:
        return None
    return number if number is not None and number.is_finite() else None


def _totals(connection: extensions.connection) -> tuple[dict[str, Decimal] | None, dict[str, int] | None]:
    known = column_names(connection, VIEW)
    wanted = [name for name in ("total", "version") if name in known]
    if "key" not in known or not wanted:
        return None, None
    found: dict[str, dict[str, Any]] = {name: {} for name in wanted}
    query = sql.SQL("SELECT key, {} FROM {}").format(
        sql.SQL(", ").join(map(sql.Identifier, wanted)), sql.Identifier(VIEW)
    )
    for key, *values in rows(connection, query):
        for name, value in zip(wanted, values, strict=True):
            if value is not None:
                found[name][key] = Decimal(value) if name == "total" else value
    return found.get("total"), found.get("version")
