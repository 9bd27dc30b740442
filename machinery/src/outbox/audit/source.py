"""Read the source: the events of the outbox table, and what its totals are to be compared, in one snapshot."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from psycopg2 import extensions, sql

from outbox.audit.declared import DIGITS_MAX, Declared, EventTopic, number_of
from outbox.audit.rows import SOURCE, load_rows, read_source
from outbox.base.database import column_names, connect, database_errors
from outbox.base.settings import Role, Settings, SourceRole
from outbox.events.schema import BIGINT_MAX, BIGINT_MIN
from outbox.sink.rows import stream

if TYPE_CHECKING:
    from outbox.audit.store import Store

AGAIN = "run the command again"
SURE_DIGITS = 19  # a number with fewer fits into 64 bits
LATE_MS = 600_000  # longer than any transaction that writes events
EVENTS = """
SELECT id, aggregatetype, type, schema_version, aggregateid, (extract(epoch FROM occurred_at) * 1000)::bigint,
       CASE WHEN (aggregatetype, type, schema_version) IN ({old}) THEN payload::text END{properties}
  FROM public.outbox
 WHERE {since}
"""
PROPERTY = f", left(payload ->> {{}}, {DIGITS_MAX + 1})"  # longer ones are no numbers
SINCE = "aggregatetype = ANY({aggregates}) AND occurred_at >= to_timestamp({since_ms} / 1000.0) AT TIME ZONE 'UTC'"
VERSIONS = "SELECT key, version FROM {} WHERE version IS NOT NULL"
NOW = "SELECT (extract(epoch FROM now()) * 1000)::bigint"


class Written(NamedTuple):
    """An event of the outbox table."""

    topic: int
    kind: int | None  # None if its type or version is not declared
    event_id: str
    key: str
    version: int | None  # None if the events have none, or if this one has no valid one
    occurred_ms: int
    numbers: Sequence[str | None]  # of the topic's properties, as texts
    payload: str | None = None  # of an older version, which has to be upcast


@dataclass
class Source:
    """The source in one snapshot."""

    events: Iterable[Written] = ()  # read once; those since the moments that were asked for
    versions: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # by topic and key, if they are known
    notes: Sequence[str] = ()
    read_at_ms: int = 0


@contextmanager
def read(
    settings: Settings, declared: Declared, store: Store, since_ms: Mapping[str, int] | None = None
) -> Iterator[Source]:
    """The source until the end of the block, with its events since a moment by topic, or all. Totals and rows that are
    compared are in the store.

    Raises Failure if the database cannot be read.
    """
    with snapshot(settings, SourceRole.AUDITOR) as connection:
        with connection.cursor() as cursor:
            cursor.execute(NOW)
            [(read_at_ms,)] = cursor.fetchall()
        compared = ((one, read_source(connection, one)) for one in declared.all_comparisons)
        load_rows(store, SOURCE, compared)
        versions, notes = _versions(connection, declared.topics)
        yield Source(_events(connection, declared, since_ms or {}), versions, notes, read_at_ms)


@contextmanager
def snapshot(settings: Settings, role: Role) -> Iterator[extensions.connection]:
    """A connection that reads one snapshot. Raises Failure if the database refuses a query of the block."""
    with closing(connect(settings, role)) as connection:
        connection.set_session(isolation_level="REPEATABLE READ", readonly=True)
        with database_errors(connection, f"reading {settings.dsn(role)['dbname']}", "refused a query", AGAIN):
            yield connection


def _since(topics: Iterable[EventTopic], since_ms: Mapping[str, int]) -> sql.Composable:
    """The condition of the events since a moment by topic."""
    parts = [
        sql.SQL(SINCE).format(
            aggregates=sql.Literal([aggregate.name for aggregate in topic.aggregates]),
            since_ms=sql.Literal(since_ms.get(topic.name, 0)),
        )
        for topic in topics
    ]
    return sql.SQL(" OR ").join(parts)


def _events(connection: extensions.connection, declared: Declared, since_ms: Mapping[str, int]) -> Iterator[Written]:
    topics = {aggregate.name: topic for topic in declared.topics for aggregate in topic.aggregates}
    kinds = {kind.row: number for number, kind in enumerate(declared.kinds)}
    names = sorted({name for topic in declared.topics for name in (*topic.properties, topic.decoder.version) if name})
    places = {topic.number: [names.index(name) for name in topic.properties] for topic in declared.topics}
    versions = {topic.number: topic.decoder.version for topic in declared.topics}
    old = [kind.row for kind in declared.kinds if kind.upcaster is not None] or [("", "", 0)]
    query = sql.SQL(EVENTS).format(
        old=sql.SQL(", ").join(map(sql.Literal, old)),
        properties=sql.Composed(sql.SQL(PROPERTY).format(sql.Literal(name)) for name in names),
        since=_since(declared.topics, since_ms),
    )
    for event_id, aggregate, type_, schema_version, key, occurred_ms, payload, *texts in stream(connection, query):
        topic = topics[aggregate].number
        version = versions[topic]
        yield Written(
            topic,
            kinds.get((aggregate, type_, schema_version)),
            event_id,
            key,
            None if version is None else version_of(texts[names.index(version)]),
            occurred_ms,
            [texts[place] for place in places[topic]],
            payload,
        )


def version_of(text: str | None) -> int | None:
    """A version as the contract has it: a whole number of 64 bits; None if the property is not one."""
    if text is not None and text.isdecimal() and len(text) < SURE_DIGITS:
        return int(text)
    number = number_of(text)
    if number is None or number != number.to_integral_value() or not BIGINT_MIN <= number <= BIGINT_MAX:
        return None
    return int(number)


def _versions(
    connection: extensions.connection, topics: Iterable[EventTopic]
) -> tuple[dict[str, dict[str, int]], list[str]]:
    """By topic and key the version in the source, where the views say it; and notes about views that do not.

    The events of a key on a topic are numbered together, whichever aggregate they are of.
    """
    found: dict[str, dict[str, int]] = {}
    notes = []
    for topic in topics:
        lacking = [view for view in topic.sources if not column_names(connection, view) >= {"key", "version"}]
        if lacking:
            names = ", ".join(lacking)
            notes.append(f"topic {topic.name}: the source has no view {names} with columns key and version")
        elif topic.sources:
            highest = found[topic.name] = {}
            for view in topic.sources:
                for key, version in stream(connection, sql.SQL(VERSIONS).format(sql.Identifier("public", view))):
                    highest[key] = max(version, highest.get(key, version))
    return found, notes
