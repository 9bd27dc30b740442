"""Staging: executors decode a large batch and copy it into the sink database, so that no driver has to hold it.

A target elsewhere stages its rows there, and here their ids and the dead letters (`outbox.sink.lakehouse.staging`).

Each task copies its records in one transaction, under its attempt id, into two unlogged tables of the running sink. The
driver then applies, in the sink's transaction, the rows of the attempts that Spark reported as successful. Rows of
other attempts (failed, speculative, of a driver that lost its fence) are never read.

The tables belong to one epoch of the sink. They are truncated after each batch; the next driver drops those of earlier
epochs. A task that hangs, on an executor that Spark has given up, would keep its lock on them. So the driver terminates
its connection, which it finds by the name SINK/EPOCH. Another session that uses a table, such as pg_dump, is left
alone: the driver waits a second for it, leaves the table to it, and makes another pair of tables, on which that session
holds no lock. So no table ever holds more than one batch, and each session leaves one pair behind at most, until a
later batch, or the next driver, drops it.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import date

import psycopg2
import pyarrow as pa
from psycopg2 import extensions, sql
from psycopg2.extensions import make_dsn

from outbox.base.database import session
from outbox.base.settings import SinkRole
from outbox.events.schema import Column
from outbox.sink import dead_letters, partitions
from outbox.sink.batch import Decoded, Rows, Staged, Traced, event_ids
from outbox.sink.decoder import RecordDecoder
from outbox.sink.layout import ATTEMPT, EVENT_TYPE, Layout
from outbox.sink.postgres import binary
from outbox.sink.records import Records, joined
from outbox.sink.spec import SinkSpec

COPY_BUFFER_BYTES = 1 << 20
TRACED_MAX = 100  # per task
LOCK_TIMEOUT_MS = 1000

TABLES = """
CREATE UNLOGGED TABLE {rows} (outbox_attempt bigint NOT NULL, {definitions});
CREATE UNLOGGED TABLE {dead} (outbox_attempt bigint NOT NULL, {of_dead});
"""
PLACE: Mapping[str, binary.Type] = {"event_id": "uuid", "partition": "integer", "offset": "bigint"}
DEAD: Mapping[str, binary.Type] = {
    "identity": "text",
    "partition": "integer",
    "offset": "bigint",
    "key": "bytea",
    "headers": "jsonb",
    "value": "bytea",
    "recorded_at": "timestamptz",
    "event_id": "uuid",
    "reason": "text",
    "detail": "text",
}
UP_TO_EPOCH = """
SELECT relname FROM pg_class
 WHERE relnamespace = 'staging'::regnamespace AND relkind = 'r' AND left(relname, length(%(prefix)s)) = %(prefix)s
   AND split_part(substr(relname, length(%(prefix)s) + 1), '/', 1)::bigint <= %(epoch)s
"""
END_TASKS = r"""
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
 WHERE datname = current_database() AND usename = current_user
   AND left(application_name, length(%(prefix)s)) = %(prefix)s
   AND substring(application_name FROM '/(\d{1,18})$')::bigint <= %(epoch)s
"""
TAKE_ROWS = """
INSERT INTO pg_temp.outbox_batch ({columns}) SELECT {columns} FROM {rows} WHERE outbox_attempt = ANY(%s)
"""
DEAD_ROWS = """
SELECT DISTINCT ON (identity) %(sink)s, identity, %(topic_id)s, %(topic)s, partition, "offset", key, headers, value,
       recorded_at, event_id, reason, detail
  FROM {dead}
 WHERE outbox_attempt = ANY(%(attempts)s)
 ORDER BY identity, partition, "offset"
"""
TAKE_DEAD = dead_letters.INSERT.format(rows=DEAD_ROWS)


class Staging:
    """The staging tables of a running sink."""

    contents: Sequence[str] = ("rows", "dead")  # what each table of a pair has; four letters, as names are bounded
    row_types: Mapping[str, binary.Type] = {}  # of ``rows`` beside the attempt; those of the sink's layout if empty

    def __init__(self, spec: SinkSpec, epoch: int, *, with_days: bool) -> None:
        """``with_days`` also finds the days of the ids, which must be UUIDv7s."""
        self._sink = spec.name
        self._with_days = with_days
        self._epoch = epoch
        self._decoders, self._layout = spec.decoders, spec.layout
        self._types = self.row_types or types_of(spec.layout.columns)
        self._pair = 1  # the number of the pair of tables that is in use
        self._up_to_epoch = {"prefix": f"{spec.name}/", "epoch": epoch}

    def create(self, connection: extensions.connection) -> None:
        """Make the pair of tables for the next batches. Call it behind the fence."""
        with connection, connection.cursor() as cursor:
            self.create_in(cursor)

    def create_in(self, cursor: extensions.cursor) -> None:
        """The same in the caller's transaction."""
        columns = {"definitions": definitions(self._types), "of_dead": definitions(DEAD)}
        cursor.execute(sql.SQL(TABLES).format(**self.names, **columns))

    def drop(self, connection: extensions.connection) -> bool:
        """Drop the tables of this epoch and of earlier ones; a later driver keeps its own.

        Returns whether all are gone: another session may use some of them.
        """
        return self._drop(connection, self._existing(connection), LOCK_TIMEOUT_MS)

    def clear(self, connection: extensions.connection) -> bool:
        """Empty the tables, between two batches: no task has anything to do then. If another session uses one, the next
        batches have tables of their own.

        Returns whether no other tables are left.
        """
        existing = self._existing(connection)
        truncate = sql.SQL("TRUNCATE {}").format(sql.SQL(", ").join(self.tables.values()))
        if not _unless_locked(connection, truncate, LOCK_TIMEOUT_MS):
            self._pair += 1
            self.create(connection)
        left = [name for name in existing if name not in map(self._name, self.contents)]
        return self._drop(connection, left, 1)  # a session that still uses them may take hours

    def _existing(self, connection: extensions.connection) -> list[str]:
        """The tables of this epoch and of earlier ones. Their tasks are ended."""
        with connection, connection.cursor() as cursor:
            cursor.execute(END_TASKS, self._up_to_epoch)
            cursor.execute(UP_TO_EPOCH, self._up_to_epoch)
            return [name for (name,) in cursor]

    def _drop(self, connection: extensions.connection, names: Sequence[str], lock_timeout_ms: int) -> bool:
        """Drop each of the tables that no other session uses; returns whether that is all of them."""
        drops = [sql.SQL("DROP TABLE staging.{}").format(sql.Identifier(name)) for name in names]
        dropped = [_unless_locked(connection, drop, lock_timeout_ms) for drop in drops]
        return all(dropped)

    def _name(self, content: str) -> str:
        return f"{self._sink}/{self._epoch}/{self._pair}/{content}"

    @property
    def tables(self) -> Mapping[str, sql.Identifier]:
        """The tables that are in use, by content."""
        return {content: sql.Identifier("staging", self._name(content)) for content in self.contents}

    @property
    def names(self) -> Mapping[str, sql.Composable]:
        """What the SQL of this module and of others names."""
        return {**self.tables, "columns": sql.SQL(", ").join(map(sql.Identifier, self._types))}

    def dsn(self, of_writer: Mapping[str, str | int]) -> Mapping[str, str | int]:
        """How tasks connect: under a name by which the driver finds them."""
        return {**of_writer, **session(SinkRole.WRITER), "application_name": f"{self._sink}/{self._epoch}"}

    def copier(self, dsn: Mapping[str, str | int], topic: str) -> Copier:
        """The function that tasks run on records of a topic."""
        rows, dead = self.tables["rows"], self.tables["dead"]
        return Copier(self.dsn(dsn), self._decoders[topic], self._layout, rows, dead, self._with_days)

    def take_rows(self, cursor: extensions.cursor, staged: Staged) -> None:
        """Insert the rows of the successful attempts into ``batch``, in the caller's transaction."""
        cursor.execute(sql.SQL(TAKE_ROWS).format(**self.names), [list(staged.attempts)])

    def take_dead(self, cursor: extensions.cursor, topic: str, topic_id: str, staged: Staged) -> int:
        """Write the dead letters of the successful attempts in the caller's transaction, and return how many records
        there were.
        """
        parameters = {"sink": self._sink, "topic": topic, "topic_id": topic_id, "attempts": list(staged.attempts)}
        cursor.execute(sql.SQL(TAKE_DEAD).format(**self.names), parameters)
        return staged.dead


@dataclass(frozen=True)
class Copier:
    """Decodes the records of one task and copies them, in one transaction. Runs in a Python worker of an executor."""

    dsn: Mapping[str, str | int]
    decoder: RecordDecoder
    layout: Layout
    rows: sql.Identifier
    dead: sql.Identifier
    with_days: bool

    def __call__(self, attempt: int, read: Iterable[Records]) -> Staged:
        """Copy the records of a task's attempt, part by part as they are read."""
        count = Count(attempt, with_days=self.with_days)
        with (
            closing(psycopg2.connect(make_dsn(None, **self.dsn))) as connection,
            connection,
            connection.cursor() as cursor,
            self.writing(cursor, attempt) as write_rows,
        ):
            for records in joined(read, self.decoder.at_once):
                decoded = self.decoder.decode(records)
                write_rows(decoded.rows)
                self.copy_dead(cursor, attempt, decoded)
                count.add(decoded)
        return count.staged()

    @contextmanager
    def writing(self, cursor: extensions.cursor, attempt: int) -> Iterator[Callable[[Rows], None]]:
        """A function that writes rows under an attempt; what it has written is complete at the end of the block."""
        yield lambda rows: copy_rows(cursor, self.rows, rows, self.layout, attempt)

    def copy_dead(self, cursor: extensions.cursor, attempt: int, decoded: Decoded) -> None:
        """Copy the dead records under an attempt."""
        if decoded.dead:
            letters = [
                (dead_letters.identity(one.record, one.event_id), *dead_letters.columns(one)) for one in decoded.dead
            ]
            copy_table(cursor, self.dead, binary.table(letters, DEAD), DEAD, attempt)


class Count:
    """Counts what an attempt has copied."""

    def __init__(self, attempt: int, *, with_days: bool) -> None:
        self._attempt = attempt
        self._with_days = with_days
        self._rows, self._dead = 0, 0
        self._days, self._traced, self._skipped = set[date](), list[Traced](), Counter[str]()

    def add(self, decoded: Decoded) -> None:
        """Count what was decoded of some more records."""
        self._rows += sum(table.num_rows for table in decoded.rows.values())
        self._dead += len(decoded.dead)
        if self._with_days:
            self._days.update(partitions.days(event_ids(decoded.rows)))
        self._traced += decoded.traced[: TRACED_MAX - len(self._traced)]
        self._skipped.update(decoded.skipped)

    def staged(self) -> Staged:
        """What it has copied."""
        return Staged([self._attempt], self._rows, self._dead, self._days, self._traced, dict(self._skipped))


def _unless_locked(connection: extensions.connection, statement: sql.Composable, lock_timeout_ms: int) -> bool:
    """Run a statement in a transaction of its own; returns whether it got its locks in time."""
    try:
        with connection, connection.cursor() as cursor:
            cursor.execute("SELECT set_config('lock_timeout', %s, true)", [f"{lock_timeout_ms}ms"])
            cursor.execute(statement)
    except psycopg2.errors.LockNotAvailable:
        return False
    return True


def definitions(types: Mapping[str, binary.Type]) -> sql.Composable:
    """The columns of a table that checks nothing."""
    return sql.SQL(", ").join(
        sql.SQL("{} {}").format(sql.Identifier(name), sql.SQL(type_)) for name, type_ in types.items()
    )


def types_of(columns: Sequence[Column]) -> Mapping[str, binary.Type]:
    """The place of an event, and these columns."""
    return {**PLACE, **{column.name: column.type for column in columns}}


def copy_rows(
    cursor: extensions.cursor, into: sql.Composable, rows: Rows, layout: Layout, attempt: int | None = None
) -> None:
    """COPY the rows of each event into a table of this layout; columns that an event lacks are NULL."""
    types: dict[str, binary.Type] = {**types_of(layout.columns), EVENT_TYPE: "label"}
    for event, table in rows.items():
        copy_table(cursor, into, layout.rows(event, table), types, attempt)


def copy_table(
    cursor: extensions.cursor,
    into: sql.Composable,
    rows: pa.Table,
    types: Mapping[str, binary.Type],
    attempt: int | None = None,
) -> None:
    """COPY rows into a table whose columns have these types, by their names; under an attempt, if there is one."""
    if not rows.num_rows:
        return
    if attempt is not None:
        rows = rows.append_column(ATTEMPT, pa.array([attempt] * rows.num_rows, pa.int64()))
        types = {**types, ATTEMPT: "bigint"}
    encoded = binary.encode(rows, types)
    columns = sql.SQL(", ").join(map(sql.Identifier, encoded.columns))
    statement = sql.SQL("COPY {} ({}) FROM STDIN WITH (FORMAT binary)").format(into, columns)
    cursor.copy_expert(statement, io.BytesIO(encoded.content), COPY_BUFFER_BYTES)
