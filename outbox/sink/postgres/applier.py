"""Apply events to tables of the sink database: the strategy, then the refusals, then the projections. Nothing is
undone.

A refused event becomes a dead letter and is not applied; what the strategy remembers of it stays. From then on the open
dead letter is what says that the event is not applied: a repetition finds the letter before the strategy is asked, and
a replay of the letter takes the event for new.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
from psycopg2 import extensions, sql

from outbox.sink import dead_letters
from outbox.sink.postgres.staging import copy_table
from outbox.sink.projection import Projection, load
from outbox.sink.records import RecordDecoder
from outbox.sink.spec import SinkSpec

PARKED = "parked"

TABLES = """
CREATE TEMPORARY TABLE batch (
    event_id uuid NOT NULL, partition int NOT NULL, "offset" bigint NOT NULL, {columns}
) ON COMMIT DELETE ROWS;
CREATE TEMPORARY TABLE new_events (LIKE batch) ON COMMIT DELETE ROWS;
CREATE TEMPORARY TABLE rejections (event_id uuid NOT NULL, reason text NOT NULL, detail text NOT NULL)
    ON COMMIT DELETE ROWS;
"""
# By the names of the columns; a property that is no column is left out.
STAGE = "INSERT INTO batch SELECT one.* FROM jsonb_populate_recordset(NULL::batch, %s::jsonb) AS one"
IS_EMPTY = "SELECT NOT EXISTS (SELECT FROM batch)"
DROP_BASED = """
DELETE FROM batch USING base_versions AS base
 WHERE base.sink = %(sink)s AND base.key = batch.{key}::text AND batch.{version} <= base.version
"""
# A replayed event that was refused is new although the strategy knows it. {condition} leaves out what the dead letter
# itself cannot decide.
ADMIT = """
WITH admitted AS (
    SELECT batch.event_id
      FROM batch JOIN dead_letters AS letter ON letter.sink = %(sink)s AND letter.identity = batch.event_id::text
     WHERE letter.status = 'open' AND ({condition})
), reopened AS (
    DELETE FROM rejections USING admitted WHERE rejections.event_id = admitted.event_id
)
INSERT INTO new_events
SELECT batch.*
  FROM batch JOIN admitted USING (event_id)
 WHERE NOT EXISTS (SELECT FROM new_events WHERE new_events.event_id = batch.event_id)
"""
# What blocks an event are earlier events of its key: open letters, but for those that are being replayed now, and what
# is refused in this transaction. An invalid record has no version: what lies behind it in its partition came later.
PARK = """
INSERT INTO rejections (event_id, reason, detail)
SELECT DISTINCT ON (new.event_id) new.event_id, %(parked)s, format('behind %%s', blocker.identity)
  FROM new_events AS new
  JOIN (SELECT identity, coalesce(key, convert_to(event ->> {key_name}, 'UTF8')) AS key,
               (event ->> {version_name})::numeric AS version, partition, "offset"
          FROM dead_letters
         WHERE sink = %(sink)s AND status = 'open'
           AND NOT EXISTS (SELECT FROM batch WHERE batch.event_id::text = identity)
         UNION ALL
        SELECT event_id::text, convert_to(refused.{key}::text, 'UTF8'), refused.{version}, partition, "offset"
          FROM new_events AS refused JOIN rejections USING (event_id)) AS blocker
    ON blocker.key = convert_to(new.{key}::text, 'UTF8')
   AND CASE WHEN blocker.version IS NULL
            THEN (new.partition, new."offset") > (blocker.partition, blocker."offset")
            ELSE new.{version} > blocker.version END
 ORDER BY new.event_id, blocker.partition, blocker."offset"
"""
DROP_REJECTED = "DELETE FROM new_events USING rejections WHERE new_events.event_id = rejections.event_id"


class Applied(NamedTuple):
    """What became of a batch: rows that were applied, events that were rejected. The other rows were duplicates."""

    applied: int
    rejected: int


class Applier:
    """Applies the events in ``batch``, on the connection that ``prepare`` was called for."""

    def __init__(self, spec: SinkSpec) -> None:
        """Raises Failure if the job has no projection for what its strategy takes."""
        self.name = spec.name
        self._strategy = spec.strategy
        self._decoder = spec.job.decoder
        self._projections: Sequence[Projection] = load(spec.job.projections, spec.strategy.takes)
        self._names = _names(spec.job.decoder)

    def prepare(self, cursor: extensions.cursor) -> None:
        """Make the temporary tables of the session."""
        columns = sql.SQL(", ").join(
            sql.SQL("{} {}").format(
                sql.Identifier(column.name), sql.SQL(column.type if column.is_nullable else f"{column.type} NOT NULL")
            )
            for column in self._decoder.columns
        )
        cursor.execute(sql.SQL(TABLES).format(columns=columns))

    def end(self, cursor: extensions.cursor) -> None:
        """Drop the temporary tables, so that the session may be prepared for another sink."""
        cursor.execute("DROP TABLE batch, new_events, rejections")

    def copy(self, cursor: extensions.cursor, rows: pa.Table) -> None:
        """Copy rows into ``batch``, by the names of their columns."""
        copy_table(cursor, sql.Identifier("batch"), rows)

    def stage(self, cursor: extensions.cursor, events_json: str) -> None:
        """Insert events into ``batch`` that are JSON objects of its columns."""
        cursor.execute(STAGE, [events_json])

    def apply(self, cursor: extensions.cursor, topic: str, topic_id: str) -> Applied:
        """Apply what is in ``batch``, in the caller's transaction, with the sink's lock held.

        Each event ends as applied or as a duplicate, and an open dead letter of it is closed; or as rejected, with an
        open dead letter.
        """
        parameters = self._parameters(cursor, topic, topic_id)
        if not parameters:
            return Applied(0, 0)
        self._execute(cursor, self._strategy.sql, parameters)
        return self._conclude(cursor, parameters)

    def replay(self, cursor: extensions.cursor, topic: str, topic_id: str, *, older_than_horizon: bool) -> Applied:
        """The same for events whose dead letters are open, which ``batch`` holds.

        ``older_than_horizon`` also applies events that the strategy has forgotten: the caller is sure that they were
        never applied.
        """
        parameters = self._parameters(cursor, topic, topic_id)
        if not parameters:
            return Applied(0, 0)
        self._execute(cursor, self._strategy.sql, parameters)
        condition = "letter.event IS NOT NULL AND letter.reason <> %(older)s"
        if older_than_horizon or self._strategy.knows == "positions":
            condition = "true"
        self._execute(
            cursor, ADMIT.replace("{condition}", condition), {**parameters, "older": dead_letters.OLDER_THAN_HORIZON}
        )
        return self._conclude(cursor, parameters)

    def _parameters(self, cursor: extensions.cursor, topic: str, topic_id: str) -> dict[str, Any]:
        """What the SQL files may refer to; empty if there is nothing to apply."""
        if self._decoder.version is not None:
            self._execute(cursor, DROP_BASED, {"sink": self.name})
        cursor.execute(IS_EMPTY)
        ((is_empty,),) = cursor.fetchall()
        return {} if is_empty else {"sink": self.name, "topic": topic, "topic_id": topic_id}

    def _conclude(self, cursor: extensions.cursor, parameters: Mapping[str, Any]) -> Applied:
        for projection in self._projections:
            if projection.refuse.strip():
                self._execute(cursor, projection.refuse, parameters)
        if any(projection.is_ordered for projection in self._projections):
            self._execute(cursor, PARK, {**parameters, "parked": PARKED})
        rejected = self._reject(cursor, str(parameters["topic"]), str(parameters["topic_id"]))
        cursor.execute("SELECT count(*) FROM new_events")
        ((applied,),) = cursor.fetchall()
        for projection in self._projections if applied else ():
            self._execute(cursor, projection.apply, parameters)
        dead_letters.mark_replayed(cursor, self.name)
        return Applied(applied, rejected)

    def _reject(self, cursor: extensions.cursor, topic: str, topic_id: str) -> int:
        cursor.execute("SELECT FROM rejections LIMIT 1")
        if not cursor.rowcount:
            return 0
        cursor.execute(DROP_REJECTED)
        return dead_letters.insert_rejected(cursor, self.name, topic, topic_id)

    def _execute(self, cursor: extensions.cursor, statement: str, parameters: Mapping[str, Any]) -> None:
        for name, identifier in self._names.items():
            statement = statement.replace(f"{{{name}}}", identifier)
        cursor.execute(statement, parameters)


def _names(decoder: RecordDecoder) -> dict[str, str]:
    """The columns that SQL may name without knowing the job: key and version."""
    names = {"key": f'"{decoder.key}"', "key_name": f"'{decoder.key}'"}
    if decoder.version is not None:
        names |= {"version": f'"{decoder.version}"', "version_name": f"'{decoder.version}'"}
    return names
