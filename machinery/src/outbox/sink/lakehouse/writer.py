"""A sink whose result is a Delta table: the events themselves, by MERGE on their ids. Postgres keeps the rest.

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
the session's; it keeps repairs out as a transaction's lock would.

Two drivers do no harm, even if the older one loses its fence in the middle of a MERGE: the table's log has one commit
per version, so the second committer is refused, or merges on top of the first and finds the events. The log stores of
HDFS, Azure and Google guarantee that. On a local disk a commit is renamed into place and would replace another one;
Delta only separates threads of one JVM (io.delta.storage.HDFSLogStore of Delta 4.2.0, RawLocalFileSystem.rename). There
a lock on a file beside the table separates processes.

The table refuses no event: what a projection would refuse is a row like any other. With a transform the first
transaction also joins the events with the rows that came back of them (`outbox.sink.postgres.transforming`): it stops
for a row that breaks a rule, counts what is left out, and writes a dead letter of each event for which the transform
fails. Only the other rows are merged. The table does not know what was left out, so that counts each time it is read.

A large batch is read and decoded by executors, which stage its rows in files (`outbox.sink.lakehouse.staging`). The
MERGE reads these files; the driver holds no row of them. Where executors cannot write files (`files.is_reachable`) the
driver decodes large batches too, and then holds up to two parts of a batch, one that is merged and one that is read.
Their records are bounded in number and bytes (`outbox.sink.spark.reader`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
from psycopg2 import extensions
from pyspark.sql import SparkSession

from outbox.sink import dead_letters, fence, positions, traces
from outbox.sink.batch import Batch, Traced
from outbox.sink.generations import TopicOffsets
from outbox.sink.lakehouse import staging
from outbox.sink.lakehouse.applier import TransformingLakehouseApplier
from outbox.sink.lakehouse.files import Folder, StagedFiles, is_reachable
from outbox.sink.lakehouse.spark_table import Files, Table
from outbox.sink.lakehouse.staging import LakehouseStaging, LakehouseTransformStaging
from outbox.sink.layout import PLACE
from outbox.sink.postgres.rows import BATCH
from outbox.sink.postgres.staging import PLACE as PLACES
from outbox.sink.postgres.staging import copy_table
from outbox.sink.records import Fetch
from outbox.sink.spec import SinkSpec
from outbox.sink.writer import Counts, SinkWriter, count

# Of a sink without a transform: the places of the events in the batch.
TABLE = """
CREATE TEMPORARY TABLE outbox_batch (event_id uuid NOT NULL, partition int NOT NULL, "offset" bigint NOT NULL)
    ON COMMIT DELETE ROWS
"""

Events = Mapping[tuple[int, int], str]  # by partition and offset, the id
Outcomes = Mapping[tuple[int, int], traces.Outcome]


class Aside(NamedTuple):
    """What a batch is before its MERGE: how far the sink is after it; the events that dead letters resolve, and those
    whose letters are to be closed; the counts of what is not merged; and of staged events that are left, the first id
    and the last. ``outcomes`` are those of traced records that are not merged.
    """

    end: TopicOffsets
    resolved: Collection[str]
    to_close: Sequence[str]
    dead: int
    rejected: int
    filtered: int
    bounds: Sequence[str]
    outcomes: Outcomes


class LakehouseWriter(SinkWriter):
    """A sink that merges into a Delta table."""

    def __init__(self, connection: extensions.connection, spec: SinkSpec, fetch: Fetch, schema: Path, uri: str) -> None:
        """Acquire the fence. ``fetch`` reads the records of dead letters; ``schema`` is the file with the statement
        that makes the table at ``uri``.

        Raises Failure if the sink has a driver already.
        """
        super().__init__(connection, spec.asked)
        self._spec, self._layout, self._fetch = spec, spec.layout, fetch
        self._merge, self._schema, self._uri = spec.strategy.select, schema, uri
        self._applier: TransformingLakehouseApplier | None = None
        self._merged = spec.layout.schema  # the columns of the rows that are merged
        if spec.job.transform is None:
            self._prepare(LakehouseStaging(spec, self._epoch, self._folder))

    def prepare(self, returned: pa.Schema) -> None:
        self._applier, self._merged = TransformingLakehouseApplier(self._spec), returned
        self._prepare(LakehouseTransformStaging(self._spec, self._epoch, returned, self._folder))

    def _prepare(self, staging: LakehouseStaging | LakehouseTransformStaging) -> None:
        """Make the tables of executors, and of the session."""
        self._staging = staging
        with self._errors("does not let the sink start"):
            if is_reachable(self._uri):
                self._stage_in(staging)
            with self._connection, self._connection.cursor() as cursor:
                if self._applier is None:
                    cursor.execute(TABLE)
                else:
                    self._applier.prepare(cursor)

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
        self._remove(self._files.drop)
        return stored

    def clear(self) -> None:
        """Remove what was staged of batches that are applied. No task may be staging meanwhile."""
        if self._is_staged:
            self._remove(self._files.clear)
        super().clear()

    def close(self) -> None:
        """Remove what the writer keeps for itself, in the database and in files. The connection is the caller's."""
        self._remove(self._files.drop)
        super().close()

    def apply(self, batch: Batch) -> Counts:
        if batch.is_empty:
            return Counts()
        refused = f"refused offsets {dict(batch.start)} to {dict(batch.end)} of topic {batch.topic}"
        with self._errors(refused), fence.held(self._connection, self.name):
            failed = _failed(batch)
            known = {*failed.values()} - self._table.missing({*failed.values()})
            aside = self._set_aside(batch, failed, known)
            missing = self._table.missing(_in_question(batch, aside))
            without = {*aside.resolved, *failed.values()}
            merged = self._table.merge(self._incoming(batch, aside), {"positions": aside.end}, without)
            counts = self._conclude(batch, merged, aside)
        traces.log_outcomes(self.name, _outcomes(batch, missing, aside.outcomes))
        self._is_staged |= batch.staged is not None
        return counts

    @cached_property
    def _table(self) -> Table:
        return Table(SparkSession.active(), self.name, self._merge, self._schema.read_text(), self._uri)

    @cached_property
    def _files(self) -> StagedFiles:
        return StagedFiles(SparkSession.active(), self._uri, self._epoch)

    def _folder(self) -> Folder:
        with self._table.errors("has no folder for staged files"):
            return self._files.folder()

    def _remove(self, remove: Callable[[], None]) -> None:
        with self._table.errors("does not let staged files be removed"):
            remove()

    def _incoming(self, batch: Batch, aside: Aside) -> pa.Table | Files:
        """The rows of a batch that the MERGE takes, and maybe some whose events letters resolve."""
        if batch.staged is not None:
            if not aside.bounds:
                return self._merged.empty_table()
            attempts = (batch.returned or batch.staged).attempts
            return Files(self._files.uris(attempts), self._merged, batch.staged.days, *aside.bounds)
        return self._layout.table(batch.rows) if batch.returned is None else batch.returned.rows

    def _set_aside(self, batch: Batch, failed: Events, known: Collection[str]) -> Aside:
        """The first transaction. Of the events for which the transform has ``failed``, the table has those that are
        ``known``: they are duplicates.
        """
        with self._connection, self._connection.cursor() as cursor:
            self._enter(cursor)
            stored = positions.read(cursor, self.name, batch.topic, batch.topic_id)
            positions.require_no_gap(self.name, batch.topic, stored, batch.start)
            self._take(cursor, batch)
            # What was replayed goes through the MERGE again: the table may have been restored to a version before that.
            resolved = dead_letters.drop_resolved(
                cursor,
                self.name,
                batch.topic,
                batch.topic_id,
                count=batch.count,
                fetch=self._fetch,
                drop_replayed=False,
            )
            if batch.staged:
                dead = self._staging.take_dead(cursor, batch.topic, batch.topic_id, batch.staged)
            else:
                dead = dead_letters.insert(cursor, self.name, batch.topic, batch.topic_id, batch.dead)
            rejected, filtered, outcomes = 0, 0, dict[tuple[int, int], traces.Outcome]()
            if self._applier is not None:
                outcomes |= traces.filtered(cursor, batch.traced)
                outcomes |= {place: "set aside" for place in failed if failed[place] not in {*known, *resolved}}
                rejected, filtered = self._applier.set_aside(cursor, batch.topic, batch.topic_id, self._fetch, known)
            end = {partition: max(offset, stored.get(partition, 0)) for partition, offset in batch.end.items()}
            return Aside(
                {**positions.read_all(cursor, self.name), batch.topic: {**stored, **end}},
                resolved,
                dead_letters.open_of_batch(cursor, self.name, batch.count),
                dead,
                rejected,
                filtered,
                staging.bounds(cursor) if batch.staged else (),
                outcomes,
            )

    def _take(self, cursor: extensions.cursor, batch: Batch) -> None:
        """Let ``batch`` have the events. It is truncated, because a table that never is holds vacuum back."""
        if self._applier is not None:
            self._applier.renew(cursor)
            self._applier.take(cursor, batch, self._staging.tables)
            return
        cursor.execute("TRUNCATE pg_temp.outbox_batch")
        if batch.staged:
            self._staging.take_rows(cursor, batch.staged)
        else:
            copy_table(cursor, BATCH, self._layout.table(batch.rows).select([*PLACES]), PLACES)

    def _conclude(self, batch: Batch, merged: int, aside: Aside) -> Counts:
        counts = Counts(
            batch.count,
            applied=merged,
            duplicates=batch.count - merged - aside.rejected - aside.filtered,
            rejected=aside.rejected,
            dead=aside.dead,
            skipped=batch.skipped_count,
            filtered=aside.filtered,
        )
        with self._connection, self._connection.cursor() as cursor:
            self._enter(cursor)
            dead_letters.close(cursor, self.name, aside.to_close)
            count(cursor, self.name, counts)
            self._pass(cursor, batch)
        return counts


def _failed(batch: Batch) -> Events:
    """The events for which the transform has failed."""
    if batch.returned is None or not batch.returned.failed:
        return {}
    rows = [row for table in batch.rows.values() for row in table.select(PLACE).to_pylist()]
    places = {(row["partition"], row["offset"]): row["event_id"] for row in rows}
    return {place: places[place] for place in batch.returned.failed}


def _in_question(batch: Batch, aside: Aside) -> set[str]:
    """Traced events that the MERGE gets, so that the table says what becomes of them."""
    found = {
        one.event_id
        for one in batch.traced
        if one.event_id and not one.is_dead and (one.partition, one.offset) not in aside.outcomes
    }
    return found - {*aside.resolved}


def _outcomes(batch: Batch, missing: set[str], others: Outcomes) -> list[tuple[Traced, traces.Outcome]]:
    """What became of a batch's traced records, given those of their events that the table did not have before, and the
    outcomes of records that were not merged. MERGE takes the first of two records of one event.
    """
    dead: Outcomes = {(one.partition, one.offset): "set aside" for one in batch.dead}
    others, missing = {**others, **dead}, {*missing}
    found: list[tuple[Traced, traces.Outcome]] = []
    for one in sorted(batch.traced, key=lambda one: (one.partition, one.offset)):
        if one.is_dead:
            found.append((one, "set aside"))
        elif (one.partition, one.offset) in others:
            found.append((one, others[one.partition, one.offset]))
        elif one.event_id in missing:
            missing.remove(one.event_id)
            found.append((one, "applied"))
        else:
            found.append((one, "duplicate"))
    return found
