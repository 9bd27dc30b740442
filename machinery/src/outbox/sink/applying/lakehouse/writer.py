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

from collections.abc import Callable, Collection
from functools import cached_property

from psycopg2 import extensions
from pyspark.sql import SparkSession

from outbox.sink.applying.lakehouse.spark_table import Table
from outbox.sink.applying.postgres.applier import DROP_ERASED
from outbox.sink.applying.postgres.target import PostgresWriter
from outbox.sink.applying.postgres.transforming import TRANSFORM_FAILED, Apply, ElsewhereApplier
from outbox.sink.decoding.batch import Batch
from outbox.sink.decoding.layout import FAILURE, IS_FILTERED, PLACE, VERSION
from outbox.sink.decoding.records import Fetch
from outbox.sink.remembering import dead_letters, fence, positions
from outbox.sink.spec import SinkSpec
from outbox.sink.writer import Applied, Counts

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
{DROP_ERASED}
   AND EXISTS (SELECT FROM public.erased_keys AS one WHERE one.topic = %(topic)s)
RETURNING batch.event_id::text
"""


class LakehouseApplier(ElsewhereApplier):
    """Does what the writer of such a table does in Postgres, and applies the events of dead letters to the table."""

    def __init__(self, spec: SinkSpec, table: Callable[[], Table], transform: Apply | None = None) -> None:
        """``table`` opens the sink's table in Spark. ``transform`` is for a replay, of a sink that has one."""
        super().__init__(spec, transform)
        self._table = table

    def drop_erased(self, cursor: extensions.cursor, topic: str) -> set[str]:
        """Take the events of erased keys out of the table ``batch``, and return their ids."""
        self._execute(cursor, DROP_ERASED_EVENTS, {"topic": topic})
        return {event_id for (event_id,) in cursor}

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
        return self._table().missing(event_ids)

    def replay(self, cursor: extensions.cursor, batch: Batch, fetch: Fetch, *, older_than_horizon: bool) -> Applied:
        """The MERGE runs between two transactions, as that of the writer. If the process ends behind it, the dead
        letters stay open, and the next replay finds their events in the table.
        """
        del older_than_horizon  # the table forgets nothing, so it has no horizon
        batch = self.transformed(cursor, batch)
        self.take(cursor, self.rows(batch))
        rejected, filtered = self.set_aside(cursor, batch, fetch)
        if not batch.frame.num_rows:
            return Applied(0, rejected, filtered)
        with fence.between_transactions(cursor, self.name):
            applied = self._table().merge(batch.frame)
        dead_letters.close(cursor, self.name, batch.frame["event_id"].to_pylist())
        return Applied(applied, rejected, filtered)


class LakehouseWriter(PostgresWriter):
    """A sink that merges into a table of a lakehouse."""

    _applier: LakehouseApplier

    def __init__(
        self, connection: extensions.connection, spec: SinkSpec, fetch: Fetch, opened: Callable[[SparkSession], Table]
    ) -> None:
        """Acquire the fence. ``fetch`` reads the records of dead letters; ``opened`` is the sink's table in Spark."""
        self._opened = opened  # later: Spark may not have started; it does when all sinks have their fences
        super().__init__(connection, spec, fetch, lambda _: LakehouseApplier(spec, lambda: self._table))

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
        encoded = self._prepared(batch)
        with fence.held(self._connection, self.name):
            failed = _failed(batch)
            # The transform fails for events that the table has too: these are duplicates.
            known = failed - self._table.missing(failed)
            with self._connection, self._connection.cursor() as cursor:
                stored = self._continue(cursor, batch)
                self._renew(cursor)
                self._applier.take(cursor, encoded)
                # What was replayed goes through the MERGE again: the table may have been restored to a version before.
                resolved = dead_letters.drop_resolved(
                    cursor,
                    self.name,
                    batch.topic,
                    batch.topic_id,
                    count=batch.chunk.count,
                    fetch=self._fetch,
                    drop_replayed=False,
                )
                resolved |= self._applier.drop_erased(cursor, batch.topic)
                dead_letters.insert(cursor, self.name, batch.topic, batch.topic_id, batch.chunk)
                rejected, filtered = self._applier.set_aside(cursor, batch, self._fetch, known)
                to_close = dead_letters.open_of_batch(cursor, self.name, batch.chunk.count)
                end = {partition: max(offset, stored.get(partition, 0)) for partition, offset in batch.end.items()}
                reached = {**positions.read_all(cursor, self.name), batch.topic: {**stored, **end}}
            said = {"positions": reached, "epoch": self._term.epoch}
            merged = self._table.merge(batch.frame, said, {*resolved, *failed})
            with self._connection, self._connection.cursor() as cursor:
                self._enter(cursor)
                dead_letters.close(cursor, self.name, to_close)
                return self._move_past(cursor, batch, Applied(merged, rejected, filtered))

    @cached_property
    def _table(self) -> Table:
        return self._opened(SparkSession.active())


def _failed(batch: Batch) -> set[str]:
    """The ids of the events for which the transform has failed."""
    if batch.returned is None or not batch.returned.failed:
        return set()
    rows = batch.chunk.frame.select(PLACE).to_pylist()
    return {row["event_id"] for row in rows if (row["partition"], row["offset"]) in batch.returned.failed}
