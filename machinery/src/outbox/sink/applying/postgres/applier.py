"""Apply events to tables of the sink database: the strategy, then the refusals, then the projections. Nothing is
undone.

A refused event becomes a dead letter and is not applied. The strategy still remembers it; its open dead letter records
that it was not applied. If the event comes again, it is dropped because of that dead letter, before the strategy runs.
`outbox dead-letters replay` applies the event, although the strategy remembers it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from outbox.base.database import naming
from outbox.base.errors import Failure
from outbox.base.heavy import extensions, extras, sql
from outbox.sink.applying.projection import Projection, load
from outbox.sink.decoding.batch import Batch
from outbox.sink.decoding.binary import Encoded
from outbox.sink.decoding.decoder import RecordDecoder
from outbox.sink.decoding.layout import Layout, TransformedLayout, view_name
from outbox.sink.decoding.records import Fetch
from outbox.sink.remembering import dead_letters
from outbox.sink.spec import SinkSpec
from outbox.sink.writer import PARKED, Applied, Applier

# The tables have no statistics, so Postgres overestimates statements, and would compile one for longer than it runs.
# By its default of 4 MB for each, sorts and hashes of a part of 100,000 events go through files.
TABLES = """
SET jit = off;
SET temp_buffers = '64MB';
SELECT set_config('work_mem', '32MB', false) WHERE pg_size_bytes(current_setting('work_mem')) < pg_size_bytes('32MB');
CREATE TEMPORARY TABLE outbox_batch (
    event_id uuid NOT NULL, partition int NOT NULL, "offset" bigint NOT NULL, {columns}
) ON COMMIT DELETE ROWS;
CREATE TEMPORARY TABLE new_events (LIKE outbox_batch) ON COMMIT DELETE ROWS;
CREATE TEMPORARY TABLE rejections (event_id uuid NOT NULL, reason text NOT NULL, detail text NOT NULL)
    ON COMMIT DELETE ROWS;
"""
KEY = "convert_to(batch.{key}::text, 'UTF8')"
# Drops events that are in what was taken from the source, and those that the sink had passed by then: a source that was
# restored has forgotten these. Returns the events with an open letter, which the caller closes. The CASE lets Postgres
# look the letters up by the primary key, as in `dead_letters.OF_BATCH`.
DROP_BASED = f"""
WITH based AS (
    DELETE FROM pg_temp.outbox_batch AS batch USING public.base_versions AS base
     WHERE base.sink = %(sink)s AND base.topic = %(topic)s AND base.key = batch.{{key}}::text
       AND (batch.{{version}} <= base.version
            OR EXISTS (SELECT FROM public.positions AS passed
                        WHERE passed.sink = %(sink)s AND passed.topic = %(topic)s AND passed.topic_id = %(topic_id)s
                          AND passed.partition = batch.partition AND batch."offset" < passed.based))
    RETURNING batch.event_id
)
SELECT letter.identity FROM public.dead_letters AS letter
 WHERE letter.sink = %(sink)s
   AND letter.identity = ANY(ARRAY(SELECT based.event_id::text FROM based WHERE ({dead_letters.HAS_OPEN})))
   AND CASE WHEN letter.status = 'open' THEN true ELSE false END
"""  # noqa: S608
# Drops events from before their key was erased.
DROP_ERASED = f"""
DELETE FROM pg_temp.outbox_batch AS batch USING public.erased_keys AS erased
 WHERE erased.topic = %(topic)s AND erased.key_hash = sha256({KEY}) AND batch.event_id <= erased.until
"""  # noqa: S608
# An event whose dead letter is open is new although the strategy knows it. {condition} leaves out what the dead letter
# itself cannot decide.
ADMIT = f"""
WITH admitted AS (
    SELECT DISTINCT ON (batch.event_id) batch.ctid AS in_batch, batch.event_id
      FROM {dead_letters.OF_BATCH}
       AND letter.status = 'open' AND ({{condition}})
     ORDER BY batch.event_id, batch.partition, batch."offset"
), reopened AS (
    DELETE FROM pg_temp.rejections AS rejected USING admitted WHERE rejected.event_id = admitted.event_id
)
INSERT INTO pg_temp.new_events
SELECT batch.*
  FROM pg_temp.outbox_batch AS batch
 WHERE batch.ctid = ANY(ARRAY(SELECT admitted.in_batch FROM admitted))
   AND NOT EXISTS (SELECT FROM pg_temp.new_events AS new WHERE new.event_id = batch.event_id)
"""  # noqa: S608
# What blocks an event are earlier events of its key: open letters, but for those whose events are in this batch, and
# what is rejected in this transaction. An undecodable record has no version: it blocks what lies behind it in its
# partition, and all of a topic that was created again since. A record of the present topic blocks no event of a former
# one. Only the earliest blocking letter per key is compared, so the cost does not grow with letters. The letters of
# each key are looked up by the index `dead_letters_of_key`; `OFFSET 0` lets Postgres plan nothing else. Its estimates
# are of no use here: `batch` has no statistics, and letters come by the thousand in one transaction.
OPEN_OF_KEYS = f"""
(SELECT DISTINCT {KEY} AS key
   FROM pg_temp.outbox_batch AS batch
  WHERE ({dead_letters.HAS_OPEN}) AND {dead_letters.MAY_BE_OPEN.format(key=KEY)}) AS ours
 CROSS JOIN LATERAL (SELECT found.* FROM public.dead_letters AS found
                      WHERE CASE WHEN found.status = 'open' THEN sha256(found.key) END = sha256(ours.key)
                     OFFSET 0) AS letter
 WHERE letter.sink = %(sink)s AND letter.topic = %(topic)s
   AND NOT EXISTS (SELECT FROM pg_temp.outbox_batch AS batch WHERE batch.event_id::text = letter.identity)
"""  # noqa: S608
# True for a letter of the topic with this id, and for one of a topic that has been deleted or created again since.
MAY_BLOCK = """
(letter.topic_id = {topic_id}
 OR NOT EXISTS (SELECT FROM public.positions AS reached
                 WHERE reached.sink = letter.sink AND reached.topic = letter.topic
                   AND reached.topic_id = letter.topic_id))
"""
PARK_BEHIND_RECORD = f"""
INSERT INTO pg_temp.rejections (event_id, reason, detail)
SELECT DISTINCT new.event_id, %(parked)s, format('behind %%s', blocker.identity)
  FROM pg_temp.new_events AS new
  JOIN (SELECT DISTINCT ON (ours.key) ours.key, letter.topic_id, letter.partition, letter."offset", letter.identity
          FROM {OPEN_OF_KEYS}
           AND NOT letter.is_event
           AND {MAY_BLOCK.format(topic_id="%(topic_id)s")}
         ORDER BY ours.key, letter.topic_id = %(topic_id)s, letter.partition, letter."offset") AS blocker
    ON blocker.key = convert_to(new.{{key}}::text, 'UTF8')
   AND (blocker.topic_id <> %(topic_id)s
        OR (new.partition, new."offset") > (blocker.partition, blocker."offset"))
"""  # noqa: S608
PARK_BEHIND_VERSION = f"""
INSERT INTO pg_temp.rejections (event_id, reason, detail)
SELECT DISTINCT new.event_id, %(parked)s, format('behind %%s', blocker.identity)
  FROM pg_temp.new_events AS new
  JOIN (SELECT DISTINCT ON (earlier.key) earlier.key, earlier.version, earlier.identity
          FROM (SELECT ours.key, letter.version, letter.identity
                  FROM {OPEN_OF_KEYS}
                   AND letter.is_event
                 UNION ALL
                SELECT convert_to(batch.{{key}}::text, 'UTF8'), batch.{{version}}, batch.event_id::text
                  FROM pg_temp.outbox_batch AS batch
                  JOIN pg_temp.rejections AS rejected ON rejected.event_id = batch.event_id) AS earlier
         ORDER BY earlier.key, earlier.version) AS blocker
    ON blocker.key = convert_to(new.{{key}}::text, 'UTF8') AND new.{{version}} > blocker.version
 WHERE NOT EXISTS (SELECT FROM pg_temp.rejections AS known
                    WHERE known.event_id = new.event_id AND known.reason = %(parked)s)
"""  # noqa: S608
COUNT_BATCH = """
SELECT count(*), EXISTS (SELECT FROM public.erased_keys AS erased WHERE erased.topic = %(topic)s)
  FROM pg_temp.outbox_batch
"""
# A projection writes what it likes into the detail, and reports show it.
HIDE_DETAILS = """
UPDATE pg_temp.rejections AS rejected SET detail = 'not shown: the sink takes personal data'
  FROM pg_temp.new_events AS new
 WHERE new.event_id = rejected.event_id AND rejected.reason <> %s
"""
COUNT_REJECTIONS = """
SELECT count(*),
       count(*) FILTER (WHERE NOT EXISTS (SELECT FROM pg_temp.new_events AS new
                                           WHERE new.event_id = rejected.event_id))
  FROM pg_temp.rejections AS rejected
"""
REJECT = "INSERT INTO pg_temp.rejections (event_id, reason, detail) VALUES %s"
DROP_REJECTED = """
DELETE FROM pg_temp.new_events AS new USING pg_temp.rejections AS rejected WHERE new.event_id = rejected.event_id
"""
BATCH = sql.Identifier("pg_temp", "outbox_batch")
NAMED = re.compile(r"\{(key|version)\}")  # what SQL may name of an event


class Known(NamedTuple):
    """The columns of events, as the layout has them, by which a sink with a transform knows them. Of events of one type
    ``type_`` is the name of that, and no column.
    """

    type_: str | None
    key: str
    version: str | None

    @classmethod
    def of_topic(cls, layout: Layout, decoder: RecordDecoder) -> Known:
        """The columns that the events of one topic are known by."""
        event = next(iter(decoder.types))
        version = None if decoder.version is None else layout.place(event, decoder.version)
        return cls(None if layout.has_types else event, layout.place(event, decoder.key), version)


class PostgresApplier(Applier):
    """Applies batches, on the connection that ``prepare`` was called for."""

    def __init__(self, spec: SinkSpec, projections: Sequence[Projection] | None = None) -> None:
        """``projections`` are by default those of the job. Raises Failure if it has none for what its strategy takes,
        or one that needs a version that its events do not have.
        """
        self.name = spec.name
        self.strategy = spec.strategy
        self._decoders, self._layout = spec.decoders, spec.layout
        self._shape: Layout | TransformedLayout = spec.layout  # of `batch`
        if projections is None:
            projections = load(spec.job.projections, spec.strategy.takes)
        self._projections: Sequence[Projection] = projections
        self._is_ordered = any(projection.is_ordered for projection in self._projections)
        if self._is_ordered and not spec.has_version:
            raise Failure(
                f"sink {self.name}: a projection in {spec.job.projections} is ordered, and its events have no version",
                "name the version in connect/events/AGGREGATE/aggregate.toml, or remove the line `-- ordered`",
                code="projection-unusable",
            )
        self._is_personal = spec.is_personal
        self._known = {topic: Known.of_topic(spec.layout, decoder) for topic, decoder in spec.decoders.items()}
        self._names = {topic: names(known.key, known.version) for topic, known in self._known.items()}

    def prepare(self, cursor: extensions.cursor) -> None:
        columns = sql.SQL(", ").join(
            sql.SQL("{} {}").format(
                sql.Identifier(column.name), sql.SQL(column.type if column.is_nullable else f"{column.type} NOT NULL")
            )
            for column in self._shape.columns
        )
        cursor.execute(sql.SQL(TABLES).format(columns=columns))
        cursor.execute(dead_letters.TABLE)
        for event in self._layout.types:
            create = sql.SQL("CREATE TEMPORARY VIEW {} AS ").format(sql.Identifier(view_name(event)))
            cursor.execute(create + self._shape.view(event))

    def renew(self, cursor: extensions.cursor) -> None:
        """Empty the temporary tables so that they begin anew for vacuum, in the caller's transaction.

        Only their session can advance their horizon, and a DELETE ROWS at the end of a transaction does not. They would
        hold the database's back for as long as the session lives.
        """
        cursor.execute("TRUNCATE pg_temp.outbox_batch, pg_temp.new_events, pg_temp.rejections, pg_temp.outbox_dead")

    def rows(self, batch: Batch) -> Sequence[Encoded]:
        """The events of a batch for the table ``batch``: before the transaction, which need not wait for it."""
        return batch.chunk.rows

    def take(self, cursor: extensions.cursor, rows: Sequence[Encoded]) -> None:
        """Copy the events of a batch into the table ``batch``."""
        for some in rows:
            some.copy(cursor, BATCH)

    def apply(self, cursor: extensions.cursor, topic: str, topic_id: str, fetch: Fetch) -> Applied:
        """Apply what is in ``batch``, in the caller's transaction, with the sink's lock held.

        Each event ends as applied or as a duplicate, and an open dead letter of it is closed; or as rejected, with an
        open dead letter, for which ``fetch`` reads its record.
        """
        admitted = dead_letters.AT_ITS_PLACE if self.strategy.knows == "positions" else None
        return self._apply(cursor, {"sink": self.name, "topic": topic, "topic_id": topic_id}, admitted, fetch)

    def replay(self, cursor: extensions.cursor, batch: Batch, fetch: Fetch, *, older_than_horizon: bool) -> Applied:
        self.take(cursor, self.rows(batch))
        parameters = {
            "sink": self.name,
            "topic": batch.topic,
            "topic_id": batch.topic_id,
            "older": dead_letters.OLDER_THAN_HORIZON,
        }
        admitted = "letter.is_event AND letter.reason <> %(older)s"
        if older_than_horizon or self.strategy.knows == "positions":
            admitted = "true"
        return self._apply(cursor, parameters, admitted, fetch)

    def _apply(
        self, cursor: extensions.cursor, parameters: Mapping[str, Any], admitted: str | None, fetch: Fetch
    ) -> Applied:
        """``admitted`` is the condition by which open letters make their events new; None if they never do."""
        if self._decoders[parameters["topic"]].version is not None:
            self._execute(cursor, DROP_BASED, parameters)
            dead_letters.close(cursor, self.name, [event_id for (event_id,) in cursor])
        cursor.execute(COUNT_BATCH, parameters)
        ((count, are_any_erased),) = cursor.fetchall()
        if count and are_any_erased:
            self._execute(cursor, DROP_ERASED, parameters)
            count -= cursor.rowcount
        if not count:
            return Applied(0, 0)
        parameters = {**parameters, "count": count}
        self._execute(cursor, self.strategy.select, parameters)
        if admitted is not None:
            self._execute(cursor, ADMIT.replace("{condition}", admitted), parameters)
        filtered, failed = self._leave_out(cursor, count)
        rejected = self._reject(cursor, parameters, fetch, has_rejections=self.strategy.rejects or bool(failed))
        if rejected:
            cursor.execute(DROP_REJECTED)
        applied = _count(cursor, "SELECT count(*) FROM pg_temp.new_events")
        if applied and self._project(cursor, parameters):
            rejected = self._reject(cursor, parameters, fetch, has_rejections=True)  # with those that wait behind them
            cursor.execute(DROP_REJECTED)
            applied = _count(cursor, "SELECT count(*) FROM pg_temp.new_events")
        if applied and self.strategy.remember:
            self._execute(cursor, self.strategy.remember, parameters)
        dead_letters.mark_replayed(cursor, self.name, count)
        return Applied(applied, rejected, filtered)

    def _project(self, cursor: extensions.cursor, parameters: Mapping[str, Any]) -> bool:
        """Apply what is in ``new_events``. Returns whether there are rejections that were none before."""
        for projection in self._projections:
            with naming(projection.file):
                self._execute(cursor, projection.apply, parameters)
        return False

    def _refuse(self, cursor: extensions.cursor, reason: str, problems: Mapping[str, str]) -> bool:
        """Reject new events, by id with a detail, in `_project`. Returns whether there are any."""
        extras.execute_values(cursor, REJECT, [(event_id, reason, problem) for event_id, problem in problems.items()])
        return bool(problems)

    def _leave_out(self, cursor: extensions.cursor, count: int) -> tuple[int, int]:
        """Take out of ``new_events`` what projections must not see; returns how many events a transform has filtered,
        and for how many it has failed. ``batch`` has ``count`` rows.
        """
        del cursor, count
        return 0, 0

    def _reject(
        self, cursor: extensions.cursor, parameters: Mapping[str, Any], fetch: Fetch, *, has_rejections: bool
    ) -> int:
        """Find what projections refuse and what must wait; write the dead letters; return how many events."""
        not_new = _count(cursor, "SELECT count(*) FROM pg_temp.rejections") if has_rejections else 0
        for projection in self._projections:
            if projection.refuse:
                with naming(projection.file):
                    self._execute(cursor, projection.refuse, parameters)
        topic, topic_id = parameters["topic"], parameters["topic_id"]
        if self._is_ordered and "version" in self._names[topic]:
            for statement in (PARK_BEHIND_RECORD, PARK_BEHIND_VERSION):
                self._execute(cursor, statement, {**parameters, "parked": PARKED})
        cursor.execute(COUNT_REJECTIONS)
        ((rejections, strays),) = cursor.fetchall()
        if strays > not_new:
            raise Failure(
                f"sink {self.name}: a projection refuses events that are not new",
                "correct it: what its section [refuse] inserts comes from `new_events`",
                code="projection-unusable",
            )
        if not rejections:
            return 0
        if self._is_personal:
            cursor.execute(HIDE_DETAILS, [PARKED])
        version = f"batch.{self._names[topic]['version']}" if "version" in self._names[topic] else "NULL"
        return dead_letters.insert_rejected(cursor, self.name, topic, topic_id, version=version, fetch=fetch)

    def _execute(self, cursor: extensions.cursor, statement: str, parameters: Mapping[str, Any]) -> None:
        # In one pass: an identifier may have braces too.
        names = self._names[parameters["topic"]]
        cursor.execute(NAMED.sub(lambda found: names.get(found[1], found[0]), statement), parameters)


def _count(cursor: extensions.cursor, query: str) -> int:
    cursor.execute(query)
    ((count,),) = cursor.fetchall()
    return int(count)


def names(key: str, version: str | None) -> dict[str, str]:
    """The columns of key and version, which SQL may name without knowing the events of a topic. A percent sign stands
    twice, for psycopg2.
    """
    found = {"key": key} if version is None else {"key": key, "version": version}
    return {word: '"' + column.replace('"', '""').replace("%", "%%") + '"' for word, column in found.items()}
