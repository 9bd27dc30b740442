"""A sink whose result is a table of a lakehouse: the events themselves, by MERGE on their ids. Postgres keeps the rest.

A commit of the table is no part of a Postgres transaction. So a batch is applied in three steps, each of which may be
repeated, under the sink's lock all the time:

1. a transaction: epoch, gap check, dead letters, and which events their letters have resolved;
2. the MERGE, one commit of the table, which also says how far the batch goes;
3. a transaction: letters of merged events are closed, counts, positions.

Dead letters are committed before the table: once the table says that it has passed an event, the event is in one of the
two. Positions are committed after it: they never claim what the table does not have. If the process ends between two
steps, the batch is delivered again: its letters exist and stay as they are, and the MERGE finds its events and skips
them (they count as duplicates, although they are not). An interrupted MERGE may leave files that no commit names.

One open transaction around all of it would not do: a MERGE may take longer than a transaction may idle. So the lock is
the session's; it keeps repairs out as a transaction's lock would. docs/strategies.md says why two drivers do no harm.

The table refuses no event: what a projection would refuse is a row like any other. With a transform the first
transaction also joins the events with the rows that came back of them (`outbox.sink.applying.postgres.transforming`):
it stops for a row that breaks a rule, counts what is left out, and writes a dead letter of each event for which the
transform fails. Only the other rows are merged. The table does not know what was left out, so that counts each time it
is read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import pyarrow as pa
from psycopg2 import extensions, sql
from pyspark.sql import SparkSession

from outbox.sink.applying.lakehouse.spark_table import Table
from outbox.sink.applying.postgres.applier import BATCH, DROP_ERASED, Known
from outbox.sink.applying.postgres.transforming import TRANSFORM_FAILED, join
from outbox.sink.decoding import binary
from outbox.sink.decoding.batch import Batch, Returned
from outbox.sink.decoding.layout import FAILURE, IS_FILTERED, KEY, PLACE, VERSION
from outbox.sink.decoding.records import Fetch
from outbox.sink.decoding.values import PLACE_TYPES, Type
from outbox.sink.remembering import dead_letters, fence, positions
from outbox.sink.remembering.positions import TopicOffsets
from outbox.sink.spec import SinkSpec
from outbox.sink.writer import Applied, Applier, Counts, SinkWriter

COLUMNS: dict[str, Type] = {**PLACE_TYPES, KEY: "text", VERSION: "bigint", IS_FILTERED: "boolean", FAILURE: "text"}
TABLES = sql.SQL(
    "CREATE TEMPORARY TABLE outbox_batch ({}) ON COMMIT DELETE ROWS; "
    "CREATE TEMPORARY TABLE rejections (event_id uuid, reason text, detail text) ON COMMIT DELETE ROWS"
).format(binary.definitions(COLUMNS))
NAMES = "pg_temp.outbox_batch, pg_temp.rejections, pg_temp.outbox_dead"
REJECT = f"""
INSERT INTO pg_temp.rejections (event_id, reason, detail)
SELECT batch.event_id, %(reason)s, batch."{FAILURE}"
  FROM pg_temp.outbox_batch AS batch
 WHERE batch."{FAILURE}" IS NOT NULL AND batch.event_id <> ALL(%(known)s::uuid[])
"""  # noqa: S608
DROP_REJECTED = """
DELETE FROM pg_temp.outbox_batch AS batch USING pg_temp.rejections AS rejected WHERE batch.event_id = rejected.event_id
"""
DROP_FILTERED = f'DELETE FROM pg_temp.outbox_batch AS batch WHERE batch."{IS_FILTERED}"'  # noqa: S608
DROP_ERASED_EVENTS = f"""
{DROP_ERASED.replace("{key}", f'"{KEY}"')}
   AND EXISTS (SELECT FROM public.erased_keys AS one WHERE one.topic = %(topic)s)
RETURNING batch.event_id::text
"""


class LakehouseApplier(Applier):
    """Does what the writer of such a table does in Postgres, and applies the events of dead letters to the table."""

    def __init__(
        self,
        spec: SinkSpec,
        table: Table,
        transform: Callable[[str, pa.Table], Returned] | None = None,
    ) -> None:
        """``transform`` is for a replay, of a sink that has one."""
        self.name, self.strategy = spec.name, spec.strategy
        self._table, self._transform = table, transform
        self._known = {topic: Known.of_topic(spec.layout, decoder) for topic, decoder in spec.decoders.items()}

    @staticmethod
    def prepare(cursor: extensions.cursor) -> None:
        """Make the temporary tables of a session."""
        cursor.execute("SET temp_buffers = '64MB'")  # as for a sink of Postgres: a replay may come to one here
        cursor.execute(TABLES)
        cursor.execute(dead_letters.TABLE)

    def take(self, cursor: extensions.cursor, batch: Batch) -> None:
        """Let the table ``batch`` have the events. It is truncated, because a table that never is holds vacuum back.

        Raises Failure if the transform has broken a rule.
        """
        cursor.execute(f"TRUNCATE {NAMES}")
        events, known = batch.chunk.frame, self._known[batch.topic]
        rows = events.select(PLACE).append_column(KEY, events[known.key].cast(pa.string()))
        if batch.returned is not None:
            rows = join(self.name, events, batch.returned, (), known).select([*COLUMNS])
        binary.encode_table(rows, COLUMNS).copy(cursor, BATCH)

    def set_aside(
        self, cursor: extensions.cursor, batch: Batch, fetch: Fetch, known: Collection[str] = ()
    ) -> tuple[int, int]:
        """Take out of the table ``batch`` what the table must not get: the events for which the transform fails,
        each with a dead letter, and those that it leaves out. Returns how many of both.

        An event that the table has, which is ``known``, is not set aside.
        """
        if batch.returned is None:
            return 0, 0
        rejected = 0
        if batch.returned.failed:
            cursor.execute(REJECT, {"reason": TRANSFORM_FAILED, "known": list(known)})
            rejected = dead_letters.insert_rejected(
                cursor, self.name, batch.topic, batch.topic_id, version=f'batch."{VERSION}"', fetch=fetch
            )
            cursor.execute(DROP_REJECTED)
        filtered = batch.chunk.count - batch.returned.rows.num_rows - len(batch.returned.failed)
        if filtered:
            dead_letters.mark_filtered(cursor, self.name, batch.chunk.count)
            cursor.execute(DROP_FILTERED)
            filtered = cursor.rowcount  # without those that letters resolve
        return rejected, filtered

    def lost(self, event_ids: Collection[str]) -> Collection[str]:
        return self._table.missing(event_ids)

    def replay(self, cursor: extensions.cursor, batch: Batch, fetch: Fetch, *, older_than_horizon: bool) -> Applied:
        """The MERGE runs between two transactions, as that of the writer. If the process ends behind it, the dead
        letters stay open, and the next replay finds their events in the table.
        """
        del older_than_horizon  # the table forgets nothing, so it has no horizon
        rows, rejected, filtered = batch.chunk.frame, 0, 0
        if self._transform is not None:
            with fence.between_transactions(cursor, self.name):
                returned = self._transform(batch.topic, rows)
            batch, rows = replace(batch, returned=returned), returned.rows
            self.take(cursor, batch)
            rejected, filtered = self.set_aside(cursor, batch, fetch)
        if not rows.num_rows:
            return Applied(0, rejected, filtered)
        with fence.between_transactions(cursor, self.name):
            applied = self._table.merge(rows)
        dead_letters.close(cursor, self.name, rows["event_id"].to_pylist())
        return Applied(applied, rejected, filtered)


class Prepared(NamedTuple):
    """A batch before its MERGE."""

    end: TopicOffsets  # the sink's positions after it
    resolved: Collection[str]  # events that dead letters resolve, or that are erased
    to_close: Sequence[str]  # events whose letters are to be closed
    rejected: int
    filtered: int


class LakehouseWriter(SinkWriter):
    """A sink that merges into a table of a lakehouse."""

    def __init__(
        self, connection: extensions.connection, spec: SinkSpec, fetch: Fetch, opened: Callable[[SparkSession], Table]
    ) -> None:
        """Acquire the fence. ``fetch`` reads the records of dead letters; ``opened`` is the sink's table in Spark."""
        super().__init__(connection, spec.asked)
        self._spec, self._fetch, self._opened = spec, fetch, opened
        # Spark may not have started: it does when all sinks have their fences.
        with self._errors("does not let the sink start"), self._connection, self._connection.cursor() as cursor:
            LakehouseApplier.prepare(cursor)

    def prepare(self, returned: pa.Schema) -> None:
        """Nothing to do: the columns are the table's."""

    def positions(self, topic: str, topic_id: str) -> dict[int, int]:
        """By partition the next offset to read. A sink without positions of any topic gets its table made.

        Raises Failure if the table of a sink with positions is missing, or if they belong to an earlier topic.
        """
        stored = super().positions(topic, topic_id)
        with self._errors("does not return positions"), self._connection, self._connection.cursor() as cursor:
            has_read = bool(positions.read_all(cursor, self.name))
        if has_read:
            self._table.require()
        else:
            self._table.make()
        return stored

    def _apply(self, batch: Batch) -> Counts:
        with fence.held(self._connection, self.name):
            failed = _failed(batch)
            prepared = self._set_aside(batch, failed - self._table.missing(failed))
            rows = batch.chunk.frame if batch.returned is None else batch.returned.rows
            said = {"positions": prepared.end, "epoch": self._term.epoch}
            merged = self._table.merge(rows, said, {*prepared.resolved, *failed})
            with self._connection, self._connection.cursor() as cursor:
                self._enter(cursor)
                dead_letters.close(cursor, self.name, prepared.to_close)
                return self._move_past(cursor, batch, Applied(merged, prepared.rejected, prepared.filtered))

    @cached_property
    def _applier(self) -> LakehouseApplier:
        return LakehouseApplier(self._spec, self._table)

    @cached_property
    def _table(self) -> Table:
        return self._opened(SparkSession.active())

    def _set_aside(self, batch: Batch, known: Collection[str]) -> Prepared:
        """The first transaction. The transform fails for ``known`` events too, but the table has these: they are
        duplicates.
        """
        with self._connection, self._connection.cursor() as cursor:
            stored = self._continue(cursor, batch)
            self._applier.take(cursor, batch)
            # What was replayed goes through the MERGE again: the table may have been restored to a version before that.
            resolved = dead_letters.drop_resolved(
                cursor,
                self.name,
                batch.topic,
                batch.topic_id,
                count=batch.chunk.count,
                fetch=self._fetch,
                drop_replayed=False,
            )
            cursor.execute(DROP_ERASED_EVENTS, {"topic": batch.topic})
            resolved |= {event_id for (event_id,) in cursor}
            dead_letters.insert(cursor, self.name, batch.topic, batch.topic_id, batch.chunk)
            rejected, filtered = self._applier.set_aside(cursor, batch, self._fetch, known)
            end = {partition: max(offset, stored.get(partition, 0)) for partition, offset in batch.end.items()}
            return Prepared(
                {**positions.read_all(cursor, self.name), batch.topic: {**stored, **end}},
                resolved,
                dead_letters.open_of_batch(cursor, self.name, batch.chunk.count),
                rejected,
                filtered,
            )


def _failed(batch: Batch) -> set[str]:
    """The ids of the events for which the transform has failed."""
    if batch.returned is None or not batch.returned.failed:
        return set()
    rows = batch.chunk.frame.select(PLACE).to_pylist()
    return {row["event_id"] for row in rows if (row["partition"], row["offset"]) in batch.returned.failed}
