"""The apply: one batch, one Postgres transaction. (A sink that is no table of this database applies otherwise, and has
the rest from here: `outbox.sink.lakehouse.writer`.)

In this order, and all or nothing: the sink's lock and epoch; the positions it must continue from; dead letters of what
could not be read; the rows, staged by COPY, but for those whose dead letter has settled what becomes of them; the
strategy, which leaves what is new in ``fresh``; the projection, which applies ``fresh``; dead letters of what it
refuses; the new positions.

Should the process end anywhere before the commit, nothing has happened. Should it end after, the reader, who has not
heard of it, delivers the same offsets again, maybe cut into other batches: the strategy's case.

Nothing here knows Spark, so that tests and benchmarks drive it as it is.
"""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
from psycopg2 import extensions, sql
from pyarrow import csv

from outbox.base.database import database_errors
from outbox.sink import dead_letters, fence, positions, traces
from outbox.sink.applier import Effect, count
from outbox.sink.batch import Batch
from outbox.sink.repair import rewind
from outbox.sink.repair.rewind import Beginning
from outbox.sink.strategy import Strategy

COPY_BUFFER_BYTES = 1 << 20


class Counts(NamedTuple):
    """What one batch was: rows = fresh + duplicates; dead counts those that could not be decoded, or were counted as
    fresh and refused.
    """

    rows: int = 0
    fresh: int = 0
    duplicates: int = 0
    dead: int = 0


class Driver(ABC):
    """A sink with the connection that it applies with, fenced off against any other driver while that lives."""

    def __init__(self, connection: extensions.connection, name: str) -> None:
        """Take the fence. Raises Failure if the sink has a driver already."""
        self.name = name
        self._connection = connection
        with self._told("does not let the sink begin"):
            self._epoch = fence.take(connection, name)

    def positions(self, topic: str, topic_id: str) -> dict[int, int]:
        """By partition the next offset to read. Raises Failure if they belong to an earlier topic of that name."""
        with self._told("does not tell positions"), self._connection, self._connection.cursor() as cursor:
            return positions.read(cursor, self.name, topic, topic_id)

    def beginning(self, topic: str) -> Beginning:
        """Which checkpoint is the sink's, and where a rewind has told it to begin."""
        with self._told("does not tell rewinds"), self._connection, self._connection.cursor() as cursor:
            return rewind.beginning(cursor, self.name, topic)

    def begin_at(self, topic: str, topic_id: str, start: dict[int, int]) -> None:
        """Declare where a sink that has no positions yet begins: what lies below is none of its business."""
        with self._told("does not take positions"), self._connection, self._connection.cursor() as cursor:
            self._enter(cursor)
            positions.write(cursor, self.name, topic, topic_id, start)

    @abstractmethod
    def apply(self, batch: Batch) -> Counts:
        """Apply a batch, commit, and tell of its traced events. An empty one costs no transaction.

        Raises Failure, with nothing changed, if events before the batch are lost, if another driver took over, or if
        the database refused the batch; and if the connection broke, when the outcome is unknown and the fence is gone.
        Either way the sink is of no more use: end the process, and let it be started again.
        """

    def _told(self, what: str) -> AbstractContextManager[None]:
        return database_errors(self._connection, f"sink {self.name}", what, "start the sink again")

    def _enter(self, cursor: extensions.cursor) -> None:
        fence.lock(cursor, self.name)
        fence.require_epoch(cursor, self.name, self._epoch)


class Sink(Driver):
    """A sink whose result is in the database that it is fenced in."""

    def __init__(self, connection: extensions.connection, strategy: Strategy, staged: Path, projection: Path) -> None:
        """Take the fence and prepare the session. ``staged`` is the file that lists the columns of an event,
        ``projection`` the SQL that applies what is in ``fresh``.

        Raises Failure if the sink has a driver already.
        """
        super().__init__(connection, strategy.name)
        self._effect = Effect(strategy, staged, projection)
        with self._told("does not let the sink begin"), connection, connection.cursor() as cursor:
            self._effect.prepare(cursor)

    def apply(self, batch: Batch) -> Counts:
        if batch.is_empty:
            return Counts()
        refused = f"refused offsets {dict(batch.start)} to {dict(batch.end)} of topic {batch.topic}, all of them"
        with self._told(refused), self._connection, self._connection.cursor() as cursor:
            counts = self._apply(cursor, batch)
            told_of = traces.outcomes(cursor, batch.traced, batch.dead)
        traces.tell(self.name, told_of, batch.traced_left_out)
        return counts

    def _apply(self, cursor: extensions.cursor, batch: Batch) -> Counts:
        self._enter(cursor)
        stored = positions.read(cursor, self.name, batch.topic, batch.topic_id)
        positions.require_no_gap(self.name, batch.topic, stored, batch.start)
        # First, as a projection that needs order looks there for what an event must wait for.
        dead = dead_letters.keep(cursor, self.name, batch.topic_id, batch.dead)
        rows, fresh, refused = batch.rows.num_rows, 0, 0
        if rows:
            stage(cursor, batch.rows)
            dead_letters.recall(cursor, self.name)
            applied, refused = self._effect.take(cursor, batch.topic, batch.topic_id)
            fresh = applied + refused
        positions.write(cursor, self.name, batch.topic, batch.topic_id, batch.end)
        count(cursor, self.name, applied=fresh - refused, duplicates=rows - fresh)
        return Counts(rows=rows, fresh=fresh, duplicates=rows - fresh, dead=dead + refused)


def stage(cursor: extensions.cursor, rows: pa.Table) -> None:
    """Copy rows into the temporary table ``staged``, by the names of their columns."""
    buffer = io.BytesIO()
    csv.write_csv(rows, buffer, csv.WriteOptions(include_header=False))
    buffer.seek(0)
    columns = sql.SQL(", ").join(map(sql.Identifier, rows.column_names))
    copy = sql.SQL("COPY staged ({}) FROM STDIN WITH (FORMAT csv)").format(columns)
    cursor.copy_expert(copy, buffer, COPY_BUFFER_BYTES)
