"""The database's guard: CHECK constraints that let in only events that the relay can send, from every client.

An event of an undeclared type would stop the relay, which creates no topic, or vanish. A record that does not fit would
stop it for everybody. `append` refuses both, and the constraints refuse them from a client that inserts without it.

`outbox migrate` keeps the constraints as they are here, also if somebody has changed or dropped one. It only adds
events, because older and newer versions of the service run side by side: an older image that migrates again removes
nothing. ``outbox migrate --only-declared`` removes the events that are no longer declared. A constraint that is added
later is NOT VALID: it holds for new rows, and Postgres reads no existing row to add it.
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
from outbox.base.settings import Settings
from outbox.events import catalog
from outbox.events.catalog import Catalog, load

NAME = "event_is_declared"
MARKER = "outbox.marker"  # the type of the rows that `outbox prune` sends through the relay
TURN = "SELECT pg_advisory_xact_lock(hashtext('outbox migrate'))"  # two runs at once wait for each other
# While the ALTER TABLE waits for its lock, all inserts wait behind it. So each attempt is shorter than the lock_timeout
# of the service (outbox/http/database.py).
LOCK_TIMEOUT_S = 1
ATTEMPTS = 5
PAUSE_S = 0.5

# As Postgres writes them back, so that a changed one is found.
CONSTRAINTS = {
    # Connect's producer takes records up to 1 MiB.
    "payload_fits_a_record": "CHECK ((octet_length((payload)::text) <= 1000000))",
    # The relay copies these into the key and the headers of a record.
    "columns_fit_a_record": "CHECK ((GREATEST(octet_length(aggregatetype), octet_length(aggregateid), "
    "octet_length(type), octet_length(traceparent)) <= 1000))",
    # Looked up by keys, so that many events cost an insert no more than few.
    NAME: "CHECK ((((('EVENTS'::jsonb -> aggregatetype) -> type) ? (schema_version)::text) IS TRUE))",
}
BOUNDS = ", ".join(f"CONSTRAINT {name} {check}" for name, check in CONSTRAINTS.items() if name != NAME)
DEFINITIONS = """
SELECT conname, pg_get_constraintdef(oid) FROM pg_constraint
 WHERE conrelid = to_regclass('public.outbox') AND conname = ANY(:names)
"""
LITERAL = re.compile(r"'(\{[^']*\})'::jsonb")
HOLDERS = """
SELECT DISTINCT format('process %s of %s', pg_locks.pid, usename)
  FROM pg_locks JOIN pg_stat_activity ON pg_stat_activity.pid = pg_locks.pid AND datname = current_database()
 WHERE relation = to_regclass('public.outbox') AND granted AND pg_locks.pid <> pg_backend_pid()
"""


class EventVersion(NamedTuple):
    """One version of an event, as a row of the outbox names it."""

    aggregatetype: str
    type: str
    schema_version: int

    def __str__(self) -> str:
        return f"{self.aggregatetype}.{self.type}.v{self.schema_version}"


class Change(NamedTuple):
    """The changes of a run."""

    added: list[str]
    removed: list[str]
    repaired: list[str]
    """The constraints that somebody had changed or dropped."""


class Guard(NamedTuple):
    """The constraints as the database has them."""

    events: set[EventVersion] | None
    """The events that it takes; None if it takes any."""
    damaged: list[str]
    """The constraints that are not as they must be, or missing."""


def declared(settings: Settings) -> set[EventVersion]:
    """The events that the database must take.

    Deprecated versions are among them: only `append` refuses to write them. So is the marker of `outbox prune`, which
    has a topic of its own.
    """
    return {*_of(catalog.of_project(settings)), EventVersion(settings.markers_topic, MARKER, 1)}


def names(events: Iterable[EventVersion]) -> list[str]:
    """The names of events that a project has declared."""
    return [str(one) for one in sorted(events) if one.type != MARKER]


def read(connection: Connection) -> Guard:
    """The constraints of the database."""
    found: dict[str, str] = dict(connection.execute(text(DEFINITIONS), {"names": [*CONSTRAINTS]}).all())
    found = {name: definition.removesuffix(" NOT VALID") for name, definition in found.items()}
    events = None
    if literal := LITERAL.search(found.get(NAME, "")):
        found[NAME] = found[NAME].replace(literal[1], "EVENTS")
        events = {
            EventVersion(aggregatetype, type_, int(version))
            for aggregatetype, types in json.loads(literal[1]).items()
            for type_, versions in types.items()
            for version in versions
        }
    return Guard(events, [name for name, check in CONSTRAINTS.items() if found.get(name) != check])


def guard(engine: Engine, wanted: set[EventVersion], *, only_declared: bool = False) -> Change:
    """Let the database take the wanted events; with ``only_declared`` no others, else also those that it takes now.

    Runs as the owner of the table. Changes nothing, and locks nothing, if the constraints are as they should be. Raises
    Failure `outbox-locked` if a transaction holds the table for too long.
    """
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(PAUSE_S)
        try:
            with engine.begin() as connection:
                return _guard(connection, wanted, only_declared)
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
    found = read(connection)
    before = found.events or set()
    after = wanted if only_declared else wanted | before
    if found.damaged or after != before:
        connection.execute(text(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT_S}s'"))
        changes = ", ".join(
            f"DROP CONSTRAINT IF EXISTS {name}, ADD CONSTRAINT {name} {check} NOT VALID"
            for name, check in CONSTRAINTS.items()
            if name == NAME or name in found.damaged
        )
        connection.exec_driver_sql(f"ALTER TABLE public.outbox {changes.replace('EVENTS', _literal(after))}")
    # Without a guard there was none yet, or somebody has dropped it: the events say so.
    repaired = [name for name in found.damaged if name != NAME or found.events is not None]
    return Change(names(after - before), names(before - after), repaired)


def has_declared(connection: Connection) -> bool:
    """Whether the database takes every event that the project declares."""
    chosen = project.current()
    return _of(load(chosen.events, chosen.topic_prefix)) <= (read(connection).events or set())


def _of(declarations: Catalog) -> set[EventVersion]:
    return {EventVersion(schema.aggregate, schema.type, schema.version) for schema in declarations.schemas}


def _literal(events: Iterable[EventVersion]) -> str:
    """The events as an object by aggregate type and type. Their names have no quote (`outbox.events.catalog`)."""
    found: dict[str, dict[str, list[str]]] = {}
    for one in sorted(events):
        found.setdefault(one.aggregatetype, {}).setdefault(one.type, []).append(str(one.schema_version))
    return json.dumps(found)
