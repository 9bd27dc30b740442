"""Staging: executors decode a large batch and copy it into the sink database, so that no driver has to hold it.

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
import itertools
import secrets
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import date

import msgspec
import psycopg2
import pyarrow as pa
from psycopg2 import extensions, sql
from psycopg2.extensions import make_dsn

from outbox.base.database import WAITS
from outbox.base.errors import Failure
from outbox.events.schema import Column
from outbox.sink import dead_letters, partitions
from outbox.sink.batch import Decoded, Rows, Staged, Traced, event_ids
from outbox.sink.layout import EVENT_TYPE, Layout
from outbox.sink.postgres import binary
from outbox.sink.records import RecordDecoder, Records, joined

COPY_BUFFER_BYTES = 1 << 20
TRACED_MAX = 100  # per task
LOCK_TIMEOUT_MS = 1000
ATTEMPT_BITS = 62
PAIR, OF_TRANSFORM = ("rows", "dead"), ("kept", "done")  # of four letters, as the names of tables are bounded

TABLES = """
CREATE UNLOGGED TABLE staging.{rows} (
    attempt bigint NOT NULL, event_id uuid NOT NULL, partition int NOT NULL, "offset" bigint NOT NULL {columns}
);
CREATE UNLOGGED TABLE staging.{dead} (
    attempt bigint NOT NULL, identity text NOT NULL, partition int NOT NULL, "offset" bigint NOT NULL, key bytea,
    headers jsonb, value bytea, recorded_at timestamptz, event_id uuid, reason text NOT NULL, detail text NOT NULL
);
"""
PLACE: Mapping[str, binary.Type] = {"event_id": "uuid", "partition": "integer", "offset": "bigint"}
DEAD: Mapping[str, binary.Type] = {
    "attempt": "bigint",
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
# Of a sink with a transform: the rows that it returns, and which attempt has read each share of a part to its end.
TRANSFORM_TABLES = """
CREATE UNLOGGED TABLE staging.{kept} (
    attempt bigint NOT NULL, event_id uuid NOT NULL, partition int NOT NULL, "offset" bigint NOT NULL {returned}
);
CREATE UNLOGGED TABLE staging.{done} (job bigint, share int, staged jsonb NOT NULL, PRIMARY KEY (job, share));
"""
# All attempts of a share read the same, so the first one that was read to its end counts.
DONE = "INSERT INTO staging.{done} (job, share, staged) VALUES (%s, %s, %s) ON CONFLICT DO NOTHING"
PASSED = "SELECT staged FROM staging.{done} WHERE job = %s ORDER BY share"
TAKE_ROWS = """
INSERT INTO batch (event_id, partition, "offset", {columns})
SELECT event_id, partition, "offset", {columns} FROM staging.{rows} WHERE attempt = ANY(%s)
"""
TAKE_DEAD = """
INSERT INTO dead_letters
       (sink, identity, topic_id, topic, partition, "offset", key, headers, value, recorded_at, event_id,
        reason, detail)
SELECT DISTINCT ON (identity) %(sink)s, identity, %(topic_id)s, %(topic)s, partition, "offset", key, headers, value,
       recorded_at, event_id, reason, detail
  FROM staging.{dead}
 WHERE attempt = ANY(%(attempts)s)
 ORDER BY identity, partition, "offset"
ON CONFLICT (sink, identity) DO UPDATE SET last_seen_at = now(),
       status = CASE dead_letters.status WHEN 'skipped' THEN 'open' ELSE dead_letters.status END
"""


class Staging:
    """The staging tables of a running sink."""

    def __init__(
        self,
        sink: str,
        epoch: int,
        decoders: Mapping[str, RecordDecoder],
        layout: Layout,
        *,
        with_days: bool,
        returned: Sequence[Column] | None = None,
    ) -> None:
        """``decoders`` are by topic. ``with_days`` also finds the days of the ids, which must be UUIDv7s. ``returned``
        are the columns of the sink's transform, if it has one.
        """
        self._sink = sink
        self._with_days = with_days
        self._epoch = epoch
        self._decoders, self._layout = decoders, layout
        self._pair = 1  # the number of the pair of tables that is in use
        self._up_to_epoch = {"prefix": f"{sink}/", "epoch": epoch}
        self._columns = sql.SQL(", ").join(sql.Identifier(column.name) for column in layout.columns)
        self._returned = returned
        self._jobs = itertools.count()

    def create(self, connection: extensions.connection) -> None:
        """Make the pair of tables for the next batches. Call it behind the fence."""
        with connection, connection.cursor() as cursor:
            columns = definitions(self._layout.columns)
            cursor.execute(sql.SQL(TABLES).format(**{**self._names, "columns": columns}))
            if self._returned is not None:
                returned = definitions(self._returned)
                cursor.execute(sql.SQL(TRANSFORM_TABLES).format(**self._names, returned=returned))

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
        tables = sql.SQL(", ").join(sql.Identifier("staging", table) for table in self._tables)
        truncate = sql.SQL("TRUNCATE {}").format(tables)
        if not _unless_locked(connection, truncate, LOCK_TIMEOUT_MS):
            self._pair += 1
            self.create(connection)
        left = [name for name in existing if name not in self._tables]
        return self._drop(connection, left, 1)  # whoever has not let go yet may take hours

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

    def _table(self, content: str) -> str:
        return f"{self._sink}/{self._epoch}/{self._pair}/{content}"

    @property
    def _tables(self) -> list[str]:
        """The tables that are in use."""
        return [self._table(content) for content in (PAIR if self._returned is None else (*PAIR, *OF_TRANSFORM))]

    @property
    def _names(self) -> Mapping[str, sql.Composable]:
        names = {content: sql.Identifier(self._table(content)) for content in (*PAIR, *OF_TRANSFORM)}
        return {**names, "columns": self._columns}

    def copier(self, dsn: Mapping[str, str | int], topic: str) -> Copier:
        """The function that tasks run on records of a topic."""
        rows, dead = (sql.Identifier("staging", self._table(content)) for content in PAIR)
        return Copier(self._named(dsn), self._decoders[topic], self._layout, rows, dead, self._with_days)

    def next_job(self) -> int:
        """A number for the tasks that read one part."""
        return next(self._jobs)

    def passing_copier(self, dsn: Mapping[str, str | int], topic: str, job: int) -> PassingCopier:
        """The function that tasks run on the records of one share of a part, by its number."""
        done = sql.SQL(DONE).format(**self._names)
        return PassingCopier(self.copier(dsn, topic), job, done)

    def returned_copier(self, dsn: Mapping[str, str | int]) -> ReturnedCopier:
        """The function that tasks run on the rows that the transform returns."""
        assert self._returned is not None, "with a transform"  # noqa: S101
        return ReturnedCopier(self._named(dsn), sql.Identifier("staging", self._table("kept")), self._returned)

    def passed(self, dsn: Mapping[str, str | int], job: int, shares: int) -> Staged:
        """What tasks have staged of so many shares. Raises Failure if one of them was not read to its end."""
        with closing(psycopg2.connect(make_dsn(None, **self._named(dsn)))) as connection, connection.cursor() as cursor:
            cursor.execute(sql.SQL(PASSED).format(**self._names), [job])
            found = [msgspec.convert(staged, Staged, strict=False) for (staged,) in cursor]
        if len(found) < shares:
            raise Failure(
                f"sink {self._sink}: its transform does not look at all events: {shares - len(found)} of {shares} "
                "shares of a batch were not read to their end",
                "a transform has no `limit`, and drops no events without looking at them",
                code="transform-breaks-rule",
            )
        return Staged.together(found)

    def _named(self, dsn: Mapping[str, str | int]) -> Mapping[str, str | int]:
        return {**dsn, **WAITS, "application_name": f"{self._sink}/{self._epoch}"}

    @property
    def tables(self) -> Mapping[str, sql.Identifier]:
        """Where rows and what the transform returned of them are staged, by ``rows`` and ``kept``."""
        return {content: sql.Identifier("staging", self._table(content)) for content in ("rows", "kept")}

    def take_rows(self, cursor: extensions.cursor, staged: Staged) -> None:
        """Insert the rows of the successful attempts into ``batch``, in the caller's transaction."""
        cursor.execute(sql.SQL(TAKE_ROWS).format(**self._names), [list(staged.attempts)])

    def take_dead(self, cursor: extensions.cursor, topic: str, topic_id: str, staged: Staged) -> None:
        """Write the dead letters of the successful attempts, in the caller's transaction."""
        parameters = {"sink": self._sink, "topic": topic, "topic_id": topic_id, "attempts": list(staged.attempts)}
        cursor.execute(sql.SQL(TAKE_DEAD).format(**self._names), parameters)


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
        ):
            for records in joined(read, self.decoder.at_once):
                decoded = self.decoder.decode(records)
                self.copy(cursor, attempt, decoded)
                count.add(decoded)
        return count.staged()

    def copy(self, cursor: extensions.cursor, attempt: int, decoded: Decoded) -> None:
        """Copy what was decoded of some records."""
        copy_rows(cursor, self.rows, decoded.rows, self.layout, attempt)
        if decoded.dead:
            letters = [
                (attempt, dead_letters.identity(one.record, one.event_id), *dead_letters.columns(one))
                for one in decoded.dead
            ]
            copy_table(cursor, self.dead, binary.table(letters, DEAD), DEAD)


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


@dataclass(frozen=True)
class PassingCopier:
    """The same for records whose rows go on to a transform: it returns what it has copied.

    Each copy is a transaction of its own, because none may stay open for as long as the transform takes. An attempt
    that does not come to its end is never read.
    """

    copier: Copier
    job: int
    done: sql.Composed

    def __call__(self, share: int, read: Iterable[Records]) -> Iterator[Decoded]:
        """Copy and return the records of a share."""
        copier = self.copier
        # Spark may run a share twice within one attempt of a task, so the task's number is not enough.
        count = Count(attempt := secrets.randbits(ATTEMPT_BITS), with_days=copier.with_days)
        with closing(psycopg2.connect(make_dsn(None, **copier.dsn))) as connection, connection.cursor() as cursor:
            connection.autocommit = True
            for records in joined(read, copier.decoder.at_once):
                decoded = copier.decoder.decode(records)
                copier.copy(cursor, attempt, decoded)
                count.add(decoded)
                yield decoded
            cursor.execute(self.done, [self.job, share, msgspec.json.encode(count.staged()).decode()])


@dataclass(frozen=True)
class ReturnedCopier:
    """Copies the rows that a transform returns, in one task. Runs in a Python worker of an executor."""

    dsn: Mapping[str, str | int]
    kept: sql.Identifier
    columns: Sequence[Column]

    def __call__(self, tables: Iterable[pa.Table]) -> tuple[int, int]:
        """Copy the rows; returns under which attempt, and how many. Raises ValueError for one that Postgres refuses."""
        attempt, count = secrets.randbits(ATTEMPT_BITS), 0
        with closing(psycopg2.connect(make_dsn(None, **self.dsn))) as connection, connection.cursor() as cursor:
            connection.autocommit = True
            for rows in tables:
                copy_returned(cursor, self.kept, rows, self.columns, attempt)
                count += rows.num_rows
        return attempt, count


def _unless_locked(connection: extensions.connection, statement: sql.Composable, lock_timeout_ms: int) -> bool:
    """Run a statement in a transaction of its own; returns whether it got its locks in time."""
    try:
        with connection, connection.cursor() as cursor:
            cursor.execute("SELECT set_config('lock_timeout', %s, true)", [f"{lock_timeout_ms}ms"])
            cursor.execute(statement)
    except psycopg2.errors.LockNotAvailable:
        return False
    return True


def definitions(columns: Sequence[Column]) -> sql.Composable:
    """Further columns of a table that checks nothing."""
    return sql.SQL("").join(
        sql.SQL(", {} {}").format(sql.Identifier(column.name), sql.SQL(column.type)) for column in columns
    )


def copy_returned(
    cursor: extensions.cursor, into: sql.Composable, rows: pa.Table, columns: Sequence[Column], attempt: int
) -> None:
    """COPY rows that a transform has returned. Raises ValueError for one that Postgres refuses."""
    types: dict[str, binary.Type] = {**PLACE, "attempt": "bigint"} | {column.name: column.type for column in columns}
    copied = rows.append_column("attempt", pa.array([attempt] * rows.num_rows, pa.int64()))
    try:
        copy_table(cursor, into, copied, types)
    except psycopg2.DataError as error:
        raise ValueError(str(error).partition("\n")[0]) from error


def copy_rows(
    cursor: extensions.cursor, into: sql.Composable, rows: Rows, layout: Layout, attempt: int | None = None
) -> None:
    """COPY the rows of each event into a table of this layout; columns that an event lacks are NULL."""
    types: dict[str, binary.Type] = {**PLACE, "attempt": "bigint"}
    types |= {column.name: column.type for column in layout.columns} | {EVENT_TYPE: "label"}
    for event, table in rows.items():
        copied = layout.rows(event, table)
        if attempt is not None:
            copied = copied.append_column("attempt", pa.array([attempt] * table.num_rows, pa.int64()))
        copy_table(cursor, into, copied, types)


def copy_table(
    cursor: extensions.cursor, into: sql.Composable, rows: pa.Table, types: Mapping[str, binary.Type]
) -> None:
    """COPY rows into a table whose columns have these types, by their names."""
    if not rows.num_rows:
        return
    encoded = binary.encode(rows, types)
    columns = sql.SQL(", ").join(map(sql.Identifier, encoded.columns))
    statement = sql.SQL("COPY {} ({}) FROM STDIN WITH (FORMAT binary)").format(into, columns)
    cursor.copy_expert(statement, io.BytesIO(encoded.content), COPY_BUFFER_BYTES)
