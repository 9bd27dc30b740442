"""Apply events to tables of the sink database: the strategy, then the refusals, then the projections. Nothing is
undone.

A refused event becomes a dead letter and is not applied. The strategy still remembers it; its open dead letter records
that it was not applied. If the event comes again, it is dropped because of that dead letter, before the strategy runs.
`outbox dead-letters replay` applies the event, although the strategy remembers it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from psycopg2 import extensions, sql

from outbox.base.errors import Failure
from outbox.sink import dead_letters
from outbox.sink.applier import PARKED, Applied, Applier
from outbox.sink.batch import Rows
from outbox.sink.decoder import RecordDecoder
from outbox.sink.layout import EVENT_TYPE, Layout, TransformedLayout, view_name
from outbox.sink.postgres.staging import copy_rows
from outbox.sink.projection import Projection, load
from outbox.sink.spec import SinkSpec

# The tables have no statistics, so Postgres overestimates statements, and would compile one for longer than it runs.
# By its default of 4 MB for each, sorts and hashes of a part of 100,000 events go through files.
TABLES = """
SET jit = off;
SET temp_buffers = '64MB';
SELECT set_config('work_mem', '32MB', false) WHERE pg_size_bytes(current_setting('work_mem')) < pg_size_bytes('32MB');
CREATE TEMPORARY TABLE batch (
    event_id uuid NOT NULL, partition int NOT NULL, "offset" bigint NOT NULL, {columns}
) ON COMMIT DELETE ROWS;
CREATE TEMPORARY TABLE new_events (LIKE batch) ON COMMIT DELETE ROWS;
CREATE TEMPORARY TABLE rejections (event_id uuid NOT NULL, reason text NOT NULL, detail text NOT NULL)
    ON COMMIT DELETE ROWS;
"""
# Inside Postgres, where numbers keep all their digits. A property that is no column is left out.
STAGE_LETTERS = """
INSERT INTO {table}
SELECT one.*
  FROM dead_letters AS letter, jsonb_populate_record(NULL::{table}, letter.event) AS one
 WHERE letter.sink = %(sink)s AND letter.identity = ANY(%(identities)s)
"""
# They are in what was taken from the source, so an open letter of one is closed. The status is no condition that an
# index of open letters has: the letters are looked up by the primary key (see `dead_letters.OF_BATCH`).
DROP_BASED = f"""
WITH based AS (
    DELETE FROM batch USING base_versions AS base
     WHERE base.sink = %(sink)s AND base.topic = %(topic)s AND base.key = batch.{{key}}::text
       AND batch.{{version}} <= base.version
    RETURNING batch.event_id
)
UPDATE dead_letters SET status = 'replayed', last_seen_at = now()
 WHERE sink = %(sink)s AND identity = ANY(ARRAY(SELECT event_id::text FROM based WHERE ({dead_letters.HAS_OPEN})))
   AND CASE WHEN status = 'open' THEN true ELSE false END
"""  # noqa: S608
# An event whose dead letter is open is new although the strategy knows it. {condition} leaves out what the dead letter
# itself cannot decide. So is one whose letter was skipped because the sink did not ask for the event.
ADMIT = f"""
WITH admitted AS (
    SELECT batch.ctid AS in_batch, batch.event_id
      FROM {dead_letters.OF_BATCH}
       AND (letter.status = 'open' AND ({{condition}})
            OR letter.status = 'skipped' AND (letter.event IS NOT NULL OR {{condition}}))
), reopened AS (
    DELETE FROM rejections USING admitted WHERE rejections.event_id = admitted.event_id
)
INSERT INTO new_events
SELECT batch.*
  FROM batch
 WHERE batch.ctid = ANY(ARRAY(SELECT in_batch FROM admitted))
   AND NOT EXISTS (SELECT FROM new_events WHERE new_events.event_id = batch.event_id)
"""  # noqa: S608
# A record that was invalid when it was read first. Who knows positions alone knows its offset, not its event.
AT_ITS_PLACE = """
letter.topic_id = %(topic_id)s AND letter.partition = batch.partition AND letter."offset" = batch."offset"
"""
# What blocks an event are earlier events of its key: open letters, but for those whose events are in this batch, and
# what is rejected in this transaction. An invalid record has no version: what lies behind it in its partition came
# later. Of all that block a key the first one decides, so that a key with many letters costs no more than others.
# The letters of each key are looked up by the index `dead_letters_of_key`; `OFFSET 0` lets Postgres plan nothing else.
# Its estimates are of no use here: `batch` has no statistics, and letters come by the thousand in one transaction.
KEY = "convert_to({key}::text, 'UTF8')"
OPEN_OF_KEYS = f"""
(SELECT DISTINCT {KEY} AS key
   FROM batch
  WHERE ({dead_letters.HAS_OPEN}) AND {dead_letters.MAY_BE_OPEN.format(key=KEY)}) AS ours
 CROSS JOIN LATERAL (SELECT sink, topic, partition, "offset", identity, event
                       FROM dead_letters
                      WHERE CASE WHEN status = 'open' THEN sha256(key) END = sha256(ours.key) OFFSET 0) AS letter
"""  # noqa: S608
PARK_BEHIND_INVALID = f"""
INSERT INTO rejections (event_id, reason, detail)
SELECT DISTINCT new.event_id, %(parked)s, format('behind %%s', blocker.identity)
  FROM new_events AS new
  JOIN (SELECT DISTINCT ON (key) key, partition, "offset", identity
          FROM {OPEN_OF_KEYS}
         WHERE sink = %(sink)s AND topic = %(topic)s AND event IS NULL
           AND NOT EXISTS (SELECT FROM batch WHERE batch.event_id::text = identity)
         ORDER BY key, partition, "offset") AS blocker
    ON blocker.key = convert_to(new.{{key}}::text, 'UTF8')
   AND (new.partition, new."offset") > (blocker.partition, blocker."offset")
"""  # noqa: S608
PARK_BEHIND_VERSION = f"""
INSERT INTO rejections (event_id, reason, detail)
SELECT DISTINCT new.event_id, %(parked)s, format('behind %%s', blocker.identity)
  FROM new_events AS new
  JOIN (SELECT DISTINCT ON (key) key, version, identity
          FROM (SELECT key, {{version_of_letter}}::numeric AS version, identity
                  FROM {OPEN_OF_KEYS}
                 WHERE sink = %(sink)s AND topic = %(topic)s AND event IS NOT NULL
                   AND NOT EXISTS (SELECT FROM batch WHERE batch.event_id::text = identity)
                 UNION ALL
                SELECT convert_to(batch.{{key}}::text, 'UTF8'), batch.{{version}}, batch.event_id::text
                  FROM batch JOIN rejections USING (event_id)) AS earlier
         ORDER BY key, version) AS blocker
    ON blocker.key = convert_to(new.{{key}}::text, 'UTF8') AND new.{{version}} > blocker.version
 WHERE NOT EXISTS (SELECT FROM rejections AS known WHERE known.event_id = new.event_id AND known.reason = %(parked)s)
"""  # noqa: S608
# The views of events ask for the topic (`outbox.sink.layout`). The setting ends with the transaction.
COUNT_BATCH = "SELECT count(*), set_config('outbox.topic', %(topic)s, true) FROM batch"
COUNT_REJECTIONS = """
SELECT count(*),
       count(*) FILTER (WHERE NOT EXISTS (SELECT FROM new_events WHERE new_events.event_id = rejections.event_id))
  FROM rejections
"""
DROP_REJECTED = "DELETE FROM new_events USING rejections WHERE new_events.event_id = rejections.event_id"


class PostgresApplier(Applier):
    """Applies the events in ``batch``, on the connection that ``prepare`` was called for."""

    staged_in = "batch"  # the temporary table of events as they were decoded

    def __init__(self, spec: SinkSpec) -> None:
        """Raises Failure if the job has no projection for what its strategy takes, or one that needs a version that its
        events do not have.
        """
        self.name = spec.name
        self.strategy = spec.strategy
        self._decoders, self._layout = spec.decoders, spec.layout
        self._shape: Layout | TransformedLayout = spec.layout  # of `batch`
        self._projections: Sequence[Projection] = load(spec.job.projections, spec.strategy.takes)
        self._is_ordered = any(projection.is_ordered for projection in self._projections)
        if self._is_ordered and not spec.has_version:
            raise Failure(
                f"sink {self.name}: a projection in {spec.job.projections} is ordered, and its events have no version",
                "name the version in connect/events/AGGREGATE/aggregate.toml, or remove the line `-- ordered`",
                code="projection-needs-version",
            )
        self._has_skipped = False
        # Where the events of letters are, as SQL, and the attempts that have staged them.
        self._of_letters = {"event": "to_jsonb(batch)", "events": ""}
        self._attempts: Sequence[int] = ()
        self._names = {topic: names(decoder, spec.layout) for topic, decoder in spec.decoders.items()}

    def prepare(self, cursor: extensions.cursor) -> None:
        columns = sql.SQL(", ").join(
            sql.SQL("{} {}").format(
                sql.Identifier(column.name), sql.SQL(column.type if column.is_nullable else f"{column.type} NOT NULL")
            )
            for column in self._shape.columns
        )
        cursor.execute(sql.SQL(TABLES).format(columns=columns))
        # Others are skipped later only as long as the sink does not ask for them.
        self._has_skipped = dead_letters.has_skipped(cursor, self.name)
        for topic, decoder in self._decoders.items():
            for event in decoder.types:
                create = sql.SQL("CREATE TEMPORARY VIEW {} AS ").format(sql.Identifier(view_name(event)))
                cursor.execute(create + self._shape.view(event, topic if len(self._decoders) > 1 else None))

    def end(self, cursor: extensions.cursor) -> None:
        cursor.execute("DROP TABLE batch, new_events, rejections CASCADE")  # with the views

    def renew(self, cursor: extensions.cursor) -> None:
        """Empty the temporary tables so that they begin anew for vacuum, in the caller's transaction.

        Only their session can advance their horizon, and a DELETE ROWS at the end of a transaction does not. They would
        hold the database's back for as long as the session lives.
        """
        cursor.execute("TRUNCATE batch, new_events, rejections")

    def copy(self, cursor: extensions.cursor, rows: Rows) -> None:
        copy_rows(cursor, sql.Identifier(self.staged_in), rows, self._layout)

    def stage_letters(self, cursor: extensions.cursor, identities: Sequence[str]) -> None:
        cursor.execute(STAGE_LETTERS.format(table=self.staged_in), {"sink": self.name, "identities": list(identities)})

    def apply(self, cursor: extensions.cursor, topic: str, topic_id: str) -> Applied:
        """Apply what is in ``batch``, in the caller's transaction, with the sink's lock held.

        Each event ends as applied or as a duplicate, and an open dead letter of it is closed; or as rejected, with an
        open dead letter.
        """
        admitted = AT_ITS_PLACE if self.strategy.knows == "positions" else "false" if self._has_skipped else None
        return self._apply(cursor, {"sink": self.name, "topic": topic, "topic_id": topic_id}, admitted)

    def replay(self, cursor: extensions.cursor, topic: str, topic_id: str, *, older_than_horizon: bool) -> Applied:
        parameters = {"sink": self.name, "topic": topic, "topic_id": topic_id, "older": dead_letters.OLDER_THAN_HORIZON}
        admitted = "letter.event IS NOT NULL AND letter.reason <> %(older)s"
        if older_than_horizon or self.strategy.knows == "positions":
            admitted = "true"
        return self._apply(cursor, parameters, admitted)

    def _apply(self, cursor: extensions.cursor, parameters: Mapping[str, Any], admitted: str | None) -> Applied:
        """``admitted`` is the condition by which open letters make their events new; None if they never do."""
        if self._decoders[parameters["topic"]].version is not None:
            self._execute(cursor, DROP_BASED, parameters)
        cursor.execute(COUNT_BATCH, parameters)
        ((count, _),) = cursor.fetchall()
        if not count:
            return Applied(0, 0)
        parameters = {**parameters, "count": count, "attempts": self._attempts}
        self._execute(cursor, self.strategy.select, parameters)
        if admitted is not None:
            self._execute(cursor, ADMIT.replace("{condition}", admitted), parameters)
        filtered, failed = self._leave_out(cursor)
        rejected = self._reject(cursor, parameters, has_rejections=self.strategy.rejects or bool(failed))
        if rejected:
            cursor.execute(DROP_REJECTED)
        applied = _count(cursor, "SELECT count(*) FROM new_events")
        for projection in self._projections if applied else ():
            self._execute(cursor, projection.apply, parameters)
        if applied and self.strategy.remember:
            self._execute(cursor, self.strategy.remember, parameters)
        dead_letters.mark_replayed(cursor, self.name, count)
        return Applied(applied, rejected, filtered)

    def _leave_out(self, cursor: extensions.cursor) -> tuple[int, int]:
        """Take out of ``new_events`` what projections must not see; returns how many events a transform has filtered,
        and for how many it has failed.
        """
        del cursor
        return 0, 0

    def _reject(self, cursor: extensions.cursor, parameters: Mapping[str, Any], *, has_rejections: bool) -> int:
        """Find what projections refuse and what must wait; write the dead letters; return how many events."""
        not_new = _count(cursor, "SELECT count(*) FROM rejections") if has_rejections else 0
        for projection in self._projections:
            if projection.refuse:
                self._execute(cursor, projection.refuse, parameters)
        if self._is_ordered:
            for statement in (PARK_BEHIND_INVALID, PARK_BEHIND_VERSION):
                self._execute(cursor, statement, {**parameters, "parked": PARKED})
        cursor.execute(COUNT_REJECTIONS)
        ((rejections, strays),) = cursor.fetchall()
        if strays > not_new:
            raise Failure(
                f"sink {self.name}: a projection refuses events that are not new",
                "correct it: what its section [refuse] inserts comes from `new_events`",
                code="projection-refuses-unknown",
            )
        if not rejections:
            return 0
        self._execute(cursor, dead_letters.INSERT_REJECTED, parameters)
        return cursor.rowcount

    def _execute(self, cursor: extensions.cursor, statement: str, parameters: Mapping[str, Any]) -> None:
        for name, identifier in {**self._names[parameters["topic"]], **self._of_letters}.items():
            statement = statement.replace(f"{{{name}}}", identifier)
        cursor.execute(statement, parameters)


def _count(cursor: extensions.cursor, query: str) -> int:
    cursor.execute(query)
    ((count,),) = cursor.fetchall()
    return int(count)


def names(decoder: RecordDecoder, layout: Layout) -> dict[str, str]:
    """What SQL may name without knowing the events of a topic: columns of key and version, and which event it is."""
    event = next(iter(decoder.types))
    versions = decoder.schema_versions
    found = {"key": f'"{layout.place(event, decoder.key)}"', "event_type": f"'{event}'"}
    found["schema_version"] = f"{versions.get(event, 'NULL')}::smallint"
    if layout.has_types:
        cases = " ".join(f"WHEN '{name}' THEN {version}" for name, version in versions.items())
        found["event_type"] = f"batch.{EVENT_TYPE}"
        found["schema_version"] = f"CASE batch.{EVENT_TYPE} {cases} END" if cases else "NULL::smallint"
    if decoder.version is not None:
        version = layout.place(event, decoder.version)
        # A letter may be from a time when the column had another name: see `outbox.sink.layout`.
        places = (decoder.version, f"{decoder.version}:bigint")
        of_letter = ", ".join(f"event ->> '{place}'" for place in places)
        found |= {"version": f'"{version}"', "version_of_letter": f"coalesce({of_letter})"}
    return found
