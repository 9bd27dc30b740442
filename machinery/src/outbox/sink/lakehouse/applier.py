"""Apply the events of dead letters to a Delta table; and, for a sink with a transform, what never reaches the table.

The MERGE runs between two transactions, like that of the writer. If the process ends behind it, the dead letters stay
open, and the next replay finds their events in the table. A MERGE cannot be rolled back, so ``dry_run`` only counts
what it would insert.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import pyarrow as pa
from psycopg2 import extensions

from outbox.sink import dead_letters, fence
from outbox.sink.applier import Applied
from outbox.sink.batch import Returned
from outbox.sink.lakehouse.spark_table import Table
from outbox.sink.layout import FAILURE, IS_FILTERED
from outbox.sink.postgres.applier import PostgresApplier
from outbox.sink.postgres.rows import BATCH, fetched
from outbox.sink.postgres.transforming import TRANSFORM_FAILED, TransformingApplier
from outbox.sink.records import Fetch
from outbox.sink.spec import SinkSpec

# Of an event that tasks have staged. The version is wanted for a dead letter only, and no projection needs it here.
KNOWN_OF_STAGED = {"type": "''", "key": "NULL", "version": "NULL"}
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


class LakehouseApplier(PostgresApplier):
    """Applies the events of dead letters to a Delta table."""

    def __init__(self, spec: SinkSpec, table: Table, *, dry_run: bool) -> None:
        super().__init__(spec)
        self._table, self._dry_run = table, dry_run

    def lost(self, event_ids: Collection[str]) -> Collection[str]:
        return self._table.missing(event_ids)

    def replay(
        self, cursor: extensions.cursor, topic: str, topic_id: str, fetch: Fetch, *, older_than_horizon: bool
    ) -> Applied:
        del topic, topic_id, fetch, older_than_horizon  # the table forgets nothing, so it has no horizon
        rows = fetched(cursor, BATCH, self._layout.columns)
        return Applied(_merge(cursor, self.name, self._table, rows, dry_run=self._dry_run), 0)


class TransformingLakehouseApplier(TransformingApplier):
    """The same for a sink with a transform. The writer of the table joins and sets aside with it.

    ``batch`` has what is known of each event, and none of the columns that the transform returns: these are in the rows
    that are merged.
    """

    def __init__(
        self,
        spec: SinkSpec,
        transform: Callable[[str, pa.Table], Returned] | None = None,
        table: Table | None = None,
        *,
        dry_run: bool = False,
    ) -> None:
        """``transform`` and ``table`` are for a replay."""
        super().__init__(spec, (), transform, dry_run=dry_run)
        self._known_of_staged = dict.fromkeys(spec.decoders, KNOWN_OF_STAGED)
        self._table = table

    def lost(self, event_ids: Collection[str]) -> Collection[str]:
        assert self._table is not None, "for a replay"  # noqa: S101
        return self._table.missing(event_ids)

    def set_aside(
        self, cursor: extensions.cursor, topic: str, topic_id: str, fetch: Fetch, known: Collection[str] = ()
    ) -> tuple[int, int]:
        """Take out of ``batch`` what the table must not get: the events for which the transform fails, each with a dead
        letter, and those that it leaves out. Returns how many of both.

        An event that the table has, which is ``known``, is not set aside.
        """
        rejected = filtered = 0
        if self._has_failed:
            cursor.execute(REJECT, {"reason": TRANSFORM_FAILED, "known": list(known)})
            rejected = self._set_aside(cursor, topic, topic_id, fetch)
            cursor.execute(DROP_REJECTED)
        if self._has_filtered:
            dead_letters.mark_filtered(cursor, self.name, self._count)
            cursor.execute(DROP_FILTERED)
            filtered = cursor.rowcount
        return rejected, filtered

    def replay(
        self, cursor: extensions.cursor, topic: str, topic_id: str, fetch: Fetch, *, older_than_horizon: bool
    ) -> Applied:
        del older_than_horizon
        assert self._table is not None, "for a replay"  # noqa: S101
        returned = self._transformed(cursor, topic)
        if returned is None:
            return Applied(0, 0)
        rejected, filtered = self.set_aside(cursor, topic, topic_id, fetch)
        return Applied(_merge(cursor, self.name, self._table, returned, dry_run=self._dry_run), rejected, filtered)


def _merge(cursor: extensions.cursor, sink: str, table: Table, rows: pa.Table, *, dry_run: bool) -> int:
    """Merge the events of dead letters, and close these; returns how many events the table did not have."""
    if not rows.num_rows:
        return 0
    event_ids = rows["event_id"].to_pylist()
    with fence.between_transactions(cursor, sink, keep=not dry_run):
        applied = len(table.missing(event_ids)) if dry_run else table.merge(rows)
    dead_letters.close(cursor, sink, event_ids)
    return applied
