"""The sink database of a contract test: emptied between deliveries, and with a clock that stands still.

A new pair of databases takes 0.3 s, emptying one takes 0.01 s, and a test delivers some hundred times. Tables that have
rows after the migration (lookup tables, the machinery's own) are left as they are.

A projection that calls `now()` gets the time that the test sets, so a delivery at another time is just that.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from psycopg2 import extensions, sql

from outbox.base.database import connect
from outbox.base.settings import Role, Settings, SinkRole

NOW = "2030-01-01 12:00:00+00"
LATER = "2030-01-02 12:01:00+00"  # a day and a minute, so that a date shows too
CLOCK = """
CREATE SCHEMA contract_clock;
GRANT USAGE ON SCHEMA contract_clock TO PUBLIC;
"""
FUNCTION = """
CREATE FUNCTION contract_clock.{name}() RETURNS timestamptz STABLE LANGUAGE sql
AS $$SELECT current_setting('outbox.contract_now')::timestamptz$$;
"""
FUNCTIONS = ("now", "transaction_timestamp", "statement_timestamp", "clock_timestamp")
# The functions of the clock come before those of Postgres. These words are no functions: they are replaced.
SET_CLOCK = "SELECT set_config('search_path', 'contract_clock, public, pg_catalog', false), set_config(%s, %s, false)"
WORDS = {
    re.compile(rf"\b{word}\b", re.IGNORECASE): instead
    for word, instead in {
        "current_timestamp": "now()",
        "current_date": "(now()::date)",
        "localtimestamp": "(now()::timestamp)",
    }.items()
}
TABLES = """
SELECT relname, relkind = 'S' FROM pg_class
 WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p', 'S') AND NOT relispartition
"""


class Database:
    """The sink database, to which nobody else connects."""

    def __init__(self, settings: Settings, owner: extensions.connection) -> None:
        """Make the clock. ``owner`` is a connection of the owner's role."""
        self.settings, self.owner = settings, owner
        with owner, owner.cursor() as cursor:
            cursor.execute(CLOCK + "".join(FUNCTION.format(name=name) for name in FUNCTIONS))
            cursor.execute(TABLES)
            found = cursor.fetchall()
            tables = [name for name, is_sequence in found if not is_sequence]
            kept = _with_rows(cursor, tables)
        self._emptied = [name for name in tables if name not in kept]
        self._restarts = [
            sql.SQL("ALTER SEQUENCE {} RESTART").format(_public(name)) for name, is_sequence in found if is_sequence
        ]

    def reset(self) -> None:
        """Empty it. An empty table is left alone, because to truncate it would take as long as one with rows."""
        with self.owner, self.owner.cursor() as cursor:
            filled = _with_rows(cursor, self._emptied)
            if filled:
                # CASCADE, because Postgres refuses to truncate a table alone if another one refers to it.
                cursor.execute(sql.SQL("TRUNCATE {} CASCADE").format(sql.SQL(", ").join(map(_public, filled))))
            for restart in self._restarts:
                cursor.execute(restart)

    @contextmanager
    def connection(self, role: Role = SinkRole.WRITER, now: str = NOW) -> Iterator[extensions.connection]:
        """A connection at a time that stands still."""
        with closing(self.connect(role, now)) as connection:
            yield connection

    def connect(self, role: Role = SinkRole.WRITER, now: str = NOW) -> extensions.connection:
        """A connection, which the caller closes, at a time that stands still."""
        connection = connect(self.settings, role)
        with connection, connection.cursor() as cursor:
            cursor.execute(SET_CLOCK, ["outbox.contract_now", now])
        return connection


@contextmanager
def opened(settings: Settings) -> Iterator[Database]:
    """The sink database of a fresh pair."""
    with closing(connect(settings, SinkRole.OWNER)) as owner:
        yield Database(settings, owner)


def with_clock(projections: Path, folder: Path) -> Path:
    """A copy of projections, in which the words for the time are calls of the clock."""
    folder.mkdir()
    for file in projections.glob("*.sql"):
        content = file.read_text()
        for word, instead in WORDS.items():
            content = word.sub(instead, content)
        (folder / file.name).write_text(content)
    return folder


def _with_rows(cursor: extensions.cursor, tables: Iterable[str]) -> set[str]:
    """The tables that have rows."""
    one = sql.SQL("SELECT {} WHERE EXISTS (SELECT FROM {})")
    cursor.execute(sql.SQL(" UNION ALL ").join(one.format(sql.Literal(name), _public(name)) for name in tables))
    return {name for (name,) in cursor.fetchall()}


def _public(name: str) -> sql.Identifier:
    return sql.Identifier("public", name)
