"""Apply events that have passed a transform: the sink knows them as they were, and projections see what it returned.

Events as they were decoded are in ``originals``, and what the transform returned of them in ``kept``: temporary tables,
or the staging tables of the same content. Here the two are joined by the place of each event into ``batch``. So the
strategy, parking and dead letters go by the event as it was, whatever the transform made of it. A row that belongs to
no event, and a second one of an event, are found there too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
from psycopg2 import extensions, sql

from outbox.base.errors import Failure
from outbox.events.schema import Column
from outbox.sink import fence
from outbox.sink.applier import Applied
from outbox.sink.batch import Batch, Returned
from outbox.sink.layout import EVENT_TYPE, FAILURE, IS_FILTERED, KEY, TYPE, VERSION, Layout, TransformedLayout
from outbox.sink.postgres.applier import PostgresApplier
from outbox.sink.postgres.rows import fetched
from outbox.sink.postgres.staging import copy_rows, definitions, types_of
from outbox.sink.postgres.transform_staging import copy_returned
from outbox.sink.records import Fetch
from outbox.sink.spec import SinkSpec

NO_ATTEMPT = 0  # of rows in the temporary tables, which are all of one batch
TRANSFORM_FAILED = "transform failed"
TABLES = """
CREATE TEMPORARY TABLE outbox_originals (outbox_attempt bigint, {columns}) ON COMMIT DELETE ROWS;
CREATE TEMPORARY TABLE outbox_kept (outbox_attempt bigint, {returned}) ON COMMIT DELETE ROWS;
"""
# Not `outbox_attempt = ANY(…)`: once autovacuum has analysed rows of earlier attempts, Postgres estimates that no row
# matches, and compares each event with each returned row. Of a function that is not NULL it estimates that nearly all
# match.
OF_ATTEMPTS = "array_position(%(attempts)s, {table}.outbox_attempt) IS NOT NULL"
TAKE = f"""
INSERT INTO pg_temp.outbox_batch
       (event_id, partition, "offset", "{TYPE}", "{KEY}", "{VERSION}", "{IS_FILTERED}", "{FAILURE}" {{returned}})
SELECT original.event_id, original.partition, original."offset", {{type}}, {{key}}, {{version}},
       kept.event_id IS NULL AND failed.detail IS NULL, failed.detail {{of_kept}}
  FROM {{originals}} AS original
  LEFT JOIN (SELECT kept.* FROM {{kept}} AS kept WHERE {OF_ATTEMPTS.format(table="kept")}) AS kept
    ON kept.partition = original.partition AND kept."offset" = original."offset" AND kept.event_id = original.event_id
  LEFT JOIN unnest(%(failed_partitions)s::int[], %(failed_offsets)s::bigint[], %(failures)s::text[])
            AS failed (partition, "offset", detail)
    ON failed.partition = original.partition AND failed."offset" = original."offset"
 WHERE {OF_ATTEMPTS.format(table="original")}
"""  # noqa: S608
COUNT_KEPT = f"""
SELECT count(*), count(*) FILTER (WHERE batch."{IS_FILTERED}"), count(*) FILTER (WHERE batch."{FAILURE}" IS NOT NULL)
  FROM pg_temp.outbox_batch AS batch
"""  # noqa: S608
EXAMPLE = f"""
SELECT kept.event_id::text, kept.partition, kept."offset", count(original.event_id) > 0
  FROM {{kept}} AS kept
  LEFT JOIN {{originals}} AS original
    ON original.partition = kept.partition AND original."offset" = kept."offset" AND original.event_id = kept.event_id
   AND {OF_ATTEMPTS.format(table="original")}
 WHERE {OF_ATTEMPTS.format(table="kept")}
 GROUP BY kept.event_id, kept.partition, kept."offset"
HAVING count(*) > 1 OR count(original.event_id) = 0
 ORDER BY 2, 3
 LIMIT 1
"""  # noqa: S608
DROP_FILTERED = f'DELETE FROM pg_temp.new_events AS new WHERE new."{IS_FILTERED}"'  # noqa: S608
REJECT_FAILED = f"""
WITH failed AS (
    DELETE FROM pg_temp.new_events AS new WHERE new."{FAILURE}" IS NOT NULL
    RETURNING new.event_id, new."{FAILURE}" AS detail
)
INSERT INTO pg_temp.rejections (event_id, reason, detail) SELECT failed.event_id, %s, failed.detail FROM failed
"""  # noqa: S608


ORIGINALS, KEPT = sql.Identifier("pg_temp", "outbox_originals"), sql.Identifier("pg_temp", "outbox_kept")

Known = Mapping[str, str]  # of an event as it was decoded: by type, key and version, the SQL for it


class Source(NamedTuple):
    """Tables with events as they were decoded, and with what the transform returned of them, and whose rows count."""

    originals: sql.Identifier
    kept: sql.Identifier
    attempts: Sequence[int]
    known: Known


class TransformingApplier(PostgresApplier):
    """Applies what a transform has returned of events."""

    events_in = "outbox_originals"

    def __init__(
        self,
        spec: SinkSpec,
        returned: Sequence[Column],
        transform: Callable[[str, pa.Table], Returned] | None = None,
        *,
        dry_run: bool = False,
    ) -> None:
        """``returned`` are the columns that the transform returns. ``transform`` calls it with a topic and events
        of it, for a replay.
        """
        super().__init__(spec)
        self._shape = TransformedLayout(spec.layout, returned)
        self._returned, self._transform, self._dry_run = returned, transform, dry_run
        self._known = {topic: _known(names, spec.layout) for topic, names in self._names.items()}
        self._known_of_staged = self._known
        self._names = {topic: _names(of_originals) for topic, of_originals in self._names.items()}
        self._count = 0  # of the events that were taken
        self._has_filtered = self._has_failed = False

    def prepare(self, cursor: extensions.cursor) -> None:
        super().prepare(cursor)
        columns, returned = (definitions(types_of(one)) for one in (self._layout.columns, self._returned))
        cursor.execute(sql.SQL(TABLES).format(columns=columns, returned=returned))

    def end(self, cursor: extensions.cursor) -> None:
        super().end(cursor)
        cursor.execute("DROP TABLE pg_temp.outbox_originals, pg_temp.outbox_kept")

    def renew(self, cursor: extensions.cursor) -> None:
        super().renew(cursor)
        cursor.execute("TRUNCATE pg_temp.outbox_originals, pg_temp.outbox_kept")

    def take(self, cursor: extensions.cursor, batch: Batch, staged: Mapping[str, sql.Identifier]) -> None:
        """Join the events of a batch, and what the transform returned of them, into ``batch``. ``staged`` are the
        staging tables, by ``rows`` and ``kept``.

        Raises Failure if the transform has broken a rule.
        """
        assert batch.returned is not None, "what the transform returned"  # noqa: S101
        if batch.staged is None:
            copy_rows(cursor, ORIGINALS, batch.rows, self._layout, NO_ATTEMPT)
            self._take_kept(cursor, batch.topic, batch.count, batch.returned)
        else:
            attempts = [*batch.staged.attempts, *batch.returned.attempts]
            source = Source(staged["rows"], staged["kept"], attempts, self._known_of_staged[batch.topic])
            self._take(cursor, batch.count, batch.returned, source)

    def replay(
        self, cursor: extensions.cursor, topic: str, topic_id: str, fetch: Fetch, *, older_than_horizon: bool
    ) -> Applied:
        """Let the events pass the transform, and apply what it returns."""
        if self._transformed(cursor, topic) is None:
            return Applied(0, 0)
        return super().replay(cursor, topic, topic_id, fetch, older_than_horizon=older_than_horizon)

    def _transformed(self, cursor: extensions.cursor, topic: str) -> pa.Table | None:
        """Let the events in ``originals`` pass the transform, while no transaction is open, and join what it returns.

        Returns that; None if there are no events.
        """
        assert self._transform is not None, "for a replay"  # noqa: S101
        rows = fetched(cursor, ORIGINALS, self._layout.columns)
        if not rows.num_rows:
            return None
        with fence.between_transactions(cursor, self.name, keep=not self._dry_run):
            returned = self._transform(topic, rows)
        copy_returned(cursor, ORIGINALS, rows, self._layout.columns, NO_ATTEMPT)
        self._take_kept(cursor, topic, rows.num_rows, returned)
        return returned.rows

    def _take_kept(self, cursor: extensions.cursor, topic: str, count: int, returned: Returned) -> None:
        """Take the temporary table of originals, and what was returned of them to this process."""
        assert returned.rows is not None, "returned to the driver"  # noqa: S101
        source = Source(ORIGINALS, KEPT, [NO_ATTEMPT], self._known[topic])
        copy_returned(cursor, source.kept, returned.rows, self._returned, NO_ATTEMPT)
        self._take(cursor, count, returned, source)

    def _take(self, cursor: extensions.cursor, count: int, returned: Returned, source: Source) -> None:
        self._attempts = list(source.attempts)
        columns = [sql.Identifier(column.name) for column in self._returned]
        statement = sql.SQL(TAKE).format(
            returned=sql.SQL("").join(sql.SQL(", {}").format(one) for one in columns),
            of_kept=sql.SQL("").join(sql.SQL(", kept.{}").format(one) for one in columns),
            originals=source.originals,
            kept=source.kept,
            **{name: sql.SQL(known) for name, known in source.known.items()},
        )
        parameters: dict[str, Any] = {
            "attempts": self._attempts,
            "failed_partitions": [partition for partition, _ in returned.failed],
            "failed_offsets": [offset for _, offset in returned.failed],
            "failures": list(returned.failed.values()),
        }
        cursor.execute(statement, parameters)
        cursor.execute(COUNT_KEPT)
        ((joined, filtered, failed),) = cursor.fetchall()
        if joined != count or joined - filtered - failed != returned.row_count:
            raise self._broken(cursor, source)
        self._count, self._has_filtered, self._has_failed = count, bool(filtered), bool(failed)

    def _leave_out(self, cursor: extensions.cursor) -> tuple[int, int]:
        filtered = failed = 0
        if self._has_filtered:
            cursor.execute(DROP_FILTERED)
            filtered = cursor.rowcount
        if self._has_failed:
            cursor.execute(REJECT_FAILED, [TRANSFORM_FAILED])
            failed = cursor.rowcount
        return filtered, failed

    def _broken(self, cursor: extensions.cursor, source: Source) -> Failure:
        example = sql.SQL(EXAMPLE).format(originals=source.originals, kept=source.kept)
        cursor.execute(example, {"attempts": self._attempts})
        found = cursor.fetchone()
        problem, where = "rows that belong to no event of the batch", ""
        if found is not None:
            event_id, partition, offset, is_known = found
            problem = "several rows of one event" if is_known else "a row that belongs to no event of the batch"
            where = f": event {event_id}, offset {offset} of partition {partition}"
        return Failure(
            f"sink {self.name}: its transform returns {problem}{where}",
            "return event_id, partition and offset unchanged, and at most one row per event",
            code="transform-breaks-rule",
        )


def _known(of_originals: Mapping[str, str], layout: Layout) -> Known:
    """What is known of an original event, given what SQL may name of it."""
    return {
        "type": f"original.{EVENT_TYPE}" if layout.has_types else f"'{next(iter(layout.types))}'",
        "key": f"original.{of_originals['key']}::text",
        "version": f"original.{of_originals['version']}" if "version" in of_originals else "NULL",
    }


def _names(of_originals: Mapping[str, str]) -> dict[str, str]:
    """What SQL may name of ``batch``, given what it may name of the events as they were."""
    return {name: f'"{KEY if name == "key" else VERSION}"' for name in of_originals}
