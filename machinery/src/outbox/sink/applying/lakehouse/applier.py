"""What Postgres does beside the MERGE of a Delta table: dead letters resolve events, close, and are written.

Its table ``batch`` has no columns of the events: these are in the rows that are merged.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

import pyarrow as pa
from psycopg2 import extensions, sql

from outbox.sink.applying.lakehouse.spark_table import Table
from outbox.sink.applying.postgres.applier import BATCH
from outbox.sink.applying.postgres.returned import Known, join
from outbox.sink.applying.postgres.transforming import TRANSFORM_FAILED
from outbox.sink.decoding import binary
from outbox.sink.decoding.batch import Batch, Returned
from outbox.sink.decoding.layout import FAILURE, IS_FILTERED, PLACE, VERSION
from outbox.sink.decoding.records import Fetch
from outbox.sink.remembering import dead_letters, fence
from outbox.sink.spec import SinkSpec
from outbox.sink.writer import Applied, Applier

COLUMNS: dict[str, binary.Type] = {**binary.PLACE, VERSION: "bigint", IS_FILTERED: "boolean", FAILURE: "text"}
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


def prepare(cursor: extensions.cursor) -> None:
    """Make the tables of a session."""
    cursor.execute("SET temp_buffers = '64MB'")  # as for a sink of Postgres: a replay may come to one in this session
    cursor.execute(TABLES)
    cursor.execute(dead_letters.TABLE)


class LakehouseApplier(Applier):
    """Does what the writer of a Delta table does in Postgres, and applies the events of dead letters to the table."""

    def __init__(
        self,
        spec: SinkSpec,
        table: Table,
        transform: Callable[[str, pa.Table], Returned] | None = None,
        *,
        dry_run: bool = False,
    ) -> None:
        """``transform`` is for a replay, of a sink that has one. A MERGE cannot be rolled back, so ``dry_run`` only
        counts what it would insert.
        """
        self.name, self.strategy = spec.name, spec.strategy
        self._table, self._transform, self._dry_run = table, transform, dry_run
        self._known = {topic: Known.of_topic(spec.layout, decoder) for topic, decoder in spec.decoders.items()}

    def prepare(self, cursor: extensions.cursor) -> None:
        prepare(cursor)

    def end(self, cursor: extensions.cursor) -> None:
        cursor.execute(f"DROP TABLE {NAMES}")

    def take(self, cursor: extensions.cursor, batch: Batch) -> None:
        """Let the table ``batch`` have the events. It is truncated, because a table that never is holds vacuum back.

        Raises Failure if the transform has broken a rule.
        """
        assert batch.chunk.events is not None, "what Spark gets"  # noqa: S101
        cursor.execute(f"TRUNCATE {NAMES}")
        rows = batch.chunk.events.select(PLACE)
        if batch.returned is not None:
            joined = join(self.name, batch.chunk.events, batch.returned, (), self._known[batch.topic])
            rows = joined.select([*COLUMNS])
        binary.encode(rows, COLUMNS).copy(cursor, BATCH)

    def set_aside(
        self, cursor: extensions.cursor, batch: Batch, fetch: Fetch, known: Collection[str] = ()
    ) -> tuple[int, int]:
        """Take out of the table ``batch`` what the Delta table must not get: the events for which the transform fails,
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
        rows, rejected, filtered = batch.chunk.events, 0, 0
        assert rows is not None, "what Spark gets"  # noqa: S101
        if self._transform is not None:
            with fence.between_transactions(cursor, self.name, keep=not self._dry_run):
                returned = self._transform(batch.topic, rows)
            batch, rows = replace(batch, returned=returned), returned.rows
            self.take(cursor, batch)
            rejected, filtered = self.set_aside(cursor, batch, fetch)
        if not rows.num_rows:
            return Applied(0, rejected, filtered)
        with fence.between_transactions(cursor, self.name, keep=not self._dry_run):
            event_ids = rows["event_id"].to_pylist()
            applied = len(self._table.missing(event_ids)) if self._dry_run else self._table.merge(rows)
        dead_letters.close(cursor, self.name, event_ids)
        return Applied(applied, rejected, filtered)
