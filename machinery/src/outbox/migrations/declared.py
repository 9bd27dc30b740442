"""The database's guard: a CHECK constraint that lets in only declared events, from every client.

An event of an undeclared type would stop the relay, which creates no topic, or vanish. `append` refuses it, and the
constraint refuses it from a client that inserts without `append`.

`outbox migrate` keeps the constraint. It only adds events, because older and newer versions of the service run side by
side: an older image that migrates again removes nothing. ``outbox migrate --only-declared`` removes the events that are
no longer declared. The constraint is NOT VALID: it holds for new rows, and Postgres reads no existing row to add it.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable
from typing import NamedTuple

from psycopg2.errors import LockNotAvailable
from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import OperationalError

from outbox.base import project
from outbox.base.errors import Failure
from outbox.events.catalog import Catalog, load

NAME = "event_is_declared"
TURN = "SELECT pg_advisory_xact_lock(hashtext('outbox migrate'))"  # two runs at once wait for each other
# While the ALTER TABLE waits for its lock, all inserts wait behind it. So each attempt is shorter than the lock_timeout
# of the service (outbox/http/database.py).
LOCK_TIMEOUT_S = 1
ATTEMPTS = 5
PAUSE_S = 0.5

DEFINITION = """
SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE conrelid = to_regclass('outbox') AND conname = :name
"""
LITERAL = re.compile(r"'(\{[^']*\})'::jsonb")
# Looked up by keys, so that many events cost an insert no more than few. The marker is what `outbox prune` sends.
ADD = f"""
ALTER TABLE outbox
    DROP CONSTRAINT IF EXISTS {NAME},
    ADD CONSTRAINT {NAME} CHECK (
        ('EVENTS'::jsonb -> aggregatetype -> type ? schema_version::text) IS TRUE
        OR (type = 'outbox.marker' AND aggregatetype LIKE '%.markers')
    ) NOT VALID
"""
HOLDERS = """
SELECT DISTINCT format('process %s of %s', pg_locks.pid, usename)
  FROM pg_locks JOIN pg_stat_activity ON pg_stat_activity.pid = pg_locks.pid AND datname = current_database()
 WHERE relation = to_regclass('outbox') AND granted AND pg_locks.pid <> pg_backend_pid()
"""


class EventVersion(NamedTuple):
    """One version of an event, as a row of the outbox names it."""

    aggregatetype: str
    type: str
    schema_version: int

    def __str__(self) -> str:
        return f"{self.aggregatetype}.{self.type}.v{self.schema_version}"


class Change(NamedTuple):
    """What a run has changed."""

    added: list[str]
    removed: list[str]


def declared(catalog: Catalog) -> set[EventVersion]:
    """What the catalog declares. Deprecated versions are among it: only `append` refuses to write them."""
    return {EventVersion(schema.aggregate, schema.type, schema.version) for schema in catalog.schemas}


def allowed(connection: Connection) -> set[EventVersion] | None:
    """What the database lets in; None if it has no constraint yet. Raises Failure for a constraint that is not ours."""
    definition = connection.execute(text(DEFINITION), {"name": NAME}).scalar()
    if definition is None:
        return None
    literal = LITERAL.search(definition)
    if literal is None:
        raise Failure(
            f"the constraint {NAME} of the table outbox is not what `outbox migrate` makes",
            f"ALTER TABLE outbox DROP CONSTRAINT {NAME}, and run `outbox migrate` again",
            code="guard-unknown",
        )
    found = json.loads(literal[1])
    return {
        EventVersion(aggregatetype, type_, int(version))
        for aggregatetype, types in found.items()
        for type_, versions in types.items()
        for version in versions
    }


def guard(engine: Engine, catalog: Catalog, *, only_declared: bool = False) -> Change:
    """Let the database take the declared events; with ``only_declared`` no others, else also those that it takes now.

    Runs as the owner of the table. Changes nothing, and locks nothing, if the constraint is as it should be. Raises
    Failure `outbox-locked` if a transaction holds the table for too long.
    """
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(PAUSE_S)
        try:
            with engine.begin() as connection:
                return _guard(connection, declared(catalog), only_declared)
        except OperationalError as error:
            if not isinstance(error.orig, LockNotAvailable):
                raise
    with engine.connect() as connection:
        holders = ", ".join(connection.execute(text(HOLDERS)).scalars()) or "which has ended by now"
    raise Failure(
        f"the declared events: another transaction locks the table outbox ({holders})",
        "wait until that transaction has ended, or end it by pg_terminate_backend, and run `outbox migrate` again",
        code="outbox-locked",
    )


def _guard(connection: Connection, wanted: set[EventVersion], only_declared: bool) -> Change:
    connection.execute(text(TURN))
    known = allowed(connection)
    before = known or set()
    after = wanted if only_declared else wanted | before
    if known is None or after != before:
        connection.execute(text(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT_S}s'"))
        connection.execute(text(ADD.replace("EVENTS", _literal(after))))
    return Change(_names(after - before), _names(before - after))


def has_declared(connection: Connection) -> bool:
    """Whether the database takes every event that the project declares."""
    chosen = project.current()
    return declared(load(chosen.events, chosen.topic_prefix)) <= (allowed(connection) or set())


def _literal(events: Iterable[EventVersion]) -> str:
    """The events as an object by aggregate type and type. Their names have no quote (`outbox.events.catalog`)."""
    found: dict[str, dict[str, list[str]]] = {}
    for one in sorted(events):
        found.setdefault(one.aggregatetype, {}).setdefault(one.type, []).append(str(one.schema_version))
    return json.dumps(found)


def _names(events: Iterable[EventVersion]) -> list[str]:
    return [str(one) for one in sorted(events)]
