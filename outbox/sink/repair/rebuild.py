"""Recompute what a sink holds, from the source or from the topic.

**From the source**: its totals as they are now become the sink's, in one transaction beside the running sink. The
version of each key at that moment becomes its base version. The sink's lock comes before the source's snapshot, so the
snapshot has whatever the sink has applied. Any other event that is in the snapshot arrives with a version that is not
above the base, and the sink drops it as a duplicate.

**From the topic**: a copy of the sink, by the engine itself under a name of its own, reads the topic from its first
event, beside the live sink. Then it replaces the live sink in one transaction. Interrupted before that, the live sink
is unchanged, and the copy resumes where it stopped.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from decimal import Decimal
from typing import NamedTuple

import psycopg2
from psycopg2 import extensions, sql
from psycopg2.extras import execute_values

from outbox.base.database import column_names, connect, database_errors
from outbox.base.errors import Failure
from outbox.base.settings import Settings, SinkRole, SourceRole
from outbox.kafka.topics import Topic
from outbox.sink import fence, generations, positions, projection
from outbox.sink.positions import Offsets
from outbox.sink.spec import SinkSpec

SUFFIX = ".rebuild"
FETCH_ROWS = 10_000
AGAIN = "run the command again"
FROM_SOURCE = "`outbox rebuild --sink {} --from source`"
NO_TOTALS = "totals are not compared: the sink database has no view sink_totals with columns sink, key and total"

REBUILD_KEY = "hashtextextended('outbox rebuild of sink ' || %(sink)s, 0)"
# Never deleted and never renamed: it records which checkpoints were used, so that each copy gets an unused one.
KEPT = "checkpoint_generations"
# Views of the project. They are optional, and so are their columns.
SOURCE_TOTALS, SINK_TOTALS = "source_totals", "sink_totals"
TABLES = """
SELECT relname FROM pg_class JOIN pg_attribute ON attrelid = pg_class.oid
 WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p') AND NOT relispartition
   AND attname = 'sink' AND NOT attisdropped AND relname <> %s
 ORDER BY relname
"""
ADD_COPY = """
INSERT INTO sinks (name, epoch, generation)
SELECT %(copy)s, 0, coalesce(max(generation), 0) FROM checkpoint_generations WHERE sink = %(copy)s
ON CONFLICT DO NOTHING
"""
# The letter as it is, but for its sink.
COPY_DISCARDED = """
INSERT INTO dead_letters
SELECT copied.*
  FROM dead_letters AS letter, jsonb_populate_record(letter, jsonb_build_object('sink', %(copy)s::text)) AS copied
 WHERE letter.sink = %(sink)s AND letter.status = 'discarded'
ON CONFLICT DO NOTHING
"""
# Letters that were discarded while the copy was made.
DISCARD = """
UPDATE dead_letters AS letter SET status = 'discarded'
  FROM dead_letters AS live
 WHERE letter.sink = %(copy)s AND letter.status = 'open'
   AND live.sink = %(sink)s AND live.identity = letter.identity AND live.status = 'discarded'
"""
SET_BASES = """
INSERT INTO base_versions (sink, key, version)
SELECT %(sink)s, total ->> 'key', (total ->> 'version')::bigint FROM source ORDER BY 2
ON CONFLICT (sink, key) DO UPDATE SET version = greatest(base_versions.version, excluded.version)
"""
# A key that the source does not have is worth nothing, and neither is any event of it so far.
SET_BASES_OF_OTHERS = """
INSERT INTO base_versions (sink, key, version)
SELECT %(sink)s, key, version FROM sink_totals
 WHERE sink = %(sink)s AND version IS NOT NULL AND NOT EXISTS (SELECT FROM source WHERE total ->> 'key' = key)
 ORDER BY 2
ON CONFLICT (sink, key) DO UPDATE SET version = greatest(base_versions.version, excluded.version)
"""
# Letters of invalid records have no version and stay open: a replay, or a valid record of the event, closes them.
CLOSE_BASED = """
UPDATE dead_letters AS letter SET status = 'replayed', last_seen_at = now()
  FROM base_versions AS base
 WHERE base.sink = %(sink)s AND letter.sink = %(sink)s AND letter.status = 'open'
   AND letter.key = convert_to(base.key, 'UTF8') AND (letter.event ->> %(version)s)::numeric <= base.version
"""
DIFFERENCES = """
SELECT key, coalesce(copy.total, 0) - coalesce(live.total, 0)
  FROM (SELECT key, total FROM sink_totals WHERE sink = %(copy)s) AS copy
  FULL JOIN (SELECT key, total FROM sink_totals WHERE sink = %(sink)s) AS live USING (key)
 WHERE coalesce(copy.total, 0) <> coalesce(live.total, 0)
"""
TAKE_COUNTS = """
UPDATE sinks SET applied = copy.applied, duplicates = copy.duplicates
  FROM sinks AS copy WHERE sinks.name = %(sink)s AND copy.name = %(copy)s
"""


class RebuildResult(NamedTuple):
    """What the source changed: by key how much more the sink holds now, where that is not zero; and by partition the
    first and the last offset of events that the topic has dropped before the sink had applied them.
    """

    differences: dict[str, Decimal]
    skipped: dict[int, tuple[int, int]]


def copy_of(sink: str) -> str:
    """The name of the copy that a rebuild from the topic makes."""
    return f"{sink}{SUFFIX}"


def from_source(
    settings: Settings, spec: SinkSpec, topic: Topic, first: Offsets, *, dry_run: bool = False
) -> RebuildResult:
    """Set what a sink holds to what the source says, in one transaction. With ``dry_run`` it is rolled back.

    ``first`` are the topic's first offsets, asked for before: what the topic has dropped by then is in the source, so a
    sink that stands before them continues there at its next start. Its counts and what it remembers of events stay.

    A key that the source does not have gets a base version too, if the view ``sink_totals`` says up to which version
    the sink has applied it. Otherwise it has none: the sink treats repeated events of it as its strategy does.

    Raises Failure if the job has no SQL for it, if its events or the source's totals have no version, or if a database
    refuses.
    """
    job, sink = spec.job, spec.name
    files = projection.rebuilds(job.projections)
    if not files or job.decoder.version is None:
        lack = "its events have no version" if files else f"{job.projections} has no NAME.rebuild.sql"
        raise Failure(
            f"sink {sink} cannot be taken from the source: {lack}",
            f"`outbox rewind --sink {sink} --to-earliest --skip-dropped` gives up what the topic has dropped",
            code="rebuild-unsupported",
        )
    with closing(connect(settings, SinkRole.WRITER)) as connection, _errors(connection, sink):
        with connection, connection.cursor() as cursor:
            cursor.execute(fence.SESSION)
        with connection, connection.cursor() as cursor:
            fence.lock(cursor, sink)
            cursor.execute("CREATE TEMPORARY TABLE source (total jsonb NOT NULL) ON COMMIT DROP")
            execute_values(cursor, "INSERT INTO source VALUES %s", _totals(settings), page_size=FETCH_ROWS)
            cursor.execute(SET_BASES, {"sink": sink})
            if {"sink", "key", "version"} <= column_names(connection, SINK_TOTALS):
                cursor.execute(SET_BASES_OF_OTHERS, {"sink": sink})
            cursor.execute(CLOSE_BASED, {"sink": sink, "version": job.decoder.version})
            differences: dict[str, Decimal] = {}
            for file in files:
                cursor.execute(file.read_text(), {"sink": sink})
                differences |= {str(key): difference for key, difference in cursor}
            skipped = _skip(cursor, sink, topic, first)
            if dry_run:
                connection.rollback()
            return RebuildResult(differences, skipped)


@contextmanager
def reserved(settings: Settings, sink: str) -> Iterator[extensions.connection]:
    """A connection to make the copy of a sink and swap it in. Nobody else can do so meanwhile.

    It is the owner's, because a sink's role may not delete. Raises Failure if another rebuild of the sink runs.
    """
    with closing(connect(settings, SinkRole.OWNER)) as connection, _errors(connection, sink):
        with connection, connection.cursor() as cursor:
            cursor.execute(fence.SESSION)
        try:
            with connection, connection.cursor() as cursor:
                cursor.execute(f"SET LOCAL lock_timeout = '{fence.GRACE_S}s'")
                cursor.execute(f"SELECT pg_advisory_lock({REBUILD_KEY})", {"sink": sink})
        except psycopg2.errors.LockNotAvailable:
            raise Failure(
                f"sink {sink} is being rebuilt already", "wait for that, or stop it", code="rebuild-running"
            ) from None
        yield connection


def begin(connection: extensions.connection, sink: str, topic: Topic, first: Offsets) -> bool:
    """Prepare the copy, unless there is one already, and return whether there is.

    It has taken over what was discarded, and its positions are declared to be 0, so that it will not begin behind
    events that are dropped between now and then.

    Raises Failure if there is nothing to copy, or if the topic does not have everything that the sink has read.
    """
    copy = copy_of(sink)
    with connection, connection.cursor() as cursor:
        fence.lock_new(cursor, copy)
        _require_this_topic(cursor, sink, topic)
        if positions.read(cursor, copy, topic.name, topic.id):
            return True
        dropped = [f"partition {partition} begins at offset {offset}" for partition, offset in first.items() if offset]
        if dropped:
            raise Failure(
                f"topic {topic.name} does not have every event any more: {', '.join(dropped)}",
                FROM_SOURCE.format(sink),
                code="topic-incomplete",
            )
        cursor.execute(ADD_COPY, {"copy": copy})
        start = dict.fromkeys(first, 0)
        positions.write(cursor, copy, topic.name, topic.id, start)
        generations.start_next(cursor, copy, topic.name, start)
        cursor.execute(COPY_DISCARDED, {"sink": sink, "copy": copy})
        return False


def drop_copy(connection: extensions.connection, sink: str) -> bool:
    """Delete the copy of a sink, and return whether there was one."""
    copy = copy_of(sink)
    with connection, connection.cursor() as cursor:
        fence.lock(cursor, copy)
        _delete(cursor, copy)
        cursor.execute("DELETE FROM sinks WHERE name = %s", (copy,))
        return bool(cursor.rowcount)


def differences(connection: extensions.connection, sink: str) -> dict[str, Decimal] | None:
    """By key how much more the copy holds than the live sink, where that is not zero.

    None if the sink database does not offer totals.
    """
    with connection, connection.cursor() as cursor:
        if not {"sink", "key", "total"} <= column_names(connection, SINK_TOTALS):
            return None
        cursor.execute(DIFFERENCES, {"sink": sink, "copy": copy_of(sink)})
        return {str(key): difference for key, difference in cursor}


def swap(connection: extensions.connection, sink: str, topic: Topic, first: Offsets) -> int:
    """Let the copy take the sink's place, in one transaction, and return the generation of its next checkpoint.

    A running driver is superseded: it stops at its next batch, and the next driver begins where the copy has ended.
    Every table with a column ``sink`` takes part, the project's own included.

    Raises Failure, with nothing changed, if there is no copy, if the topic has dropped what comes after it, or if the
    database refuses.
    """
    names = {"sink": sink, "copy": copy_of(sink)}
    with connection, connection.cursor() as cursor:
        for name in names.values():
            fence.lock(cursor, name)
        reached = positions.read(cursor, names["copy"], topic.name, topic.id)
        if not reached:
            raise Failure(f"there is no copy of sink {sink}", AGAIN, code="copy-missing")
        positions.require_no_gap(names["copy"], topic.name, reached, first)
        cursor.execute(DISCARD, names)
        _delete(cursor, sink)
        for table in _tables(cursor):
            cursor.execute(sql.SQL("UPDATE {} SET sink = %(sink)s WHERE sink = %(copy)s").format(table), names)
        cursor.execute(TAKE_COUNTS, names)
        cursor.execute("DELETE FROM sinks WHERE name = %(copy)s", names)
        fence.supersede(cursor, sink)
        return generations.start_next(cursor, sink, topic.name, reached)


def _totals(settings: Settings) -> Iterator[tuple[str]]:
    """The source's totals as JSON, all of one snapshot."""
    with closing(connect(settings, SourceRole.AUDITOR)) as connection:
        connection.set_session(isolation_level="REPEATABLE READ", readonly=True)
        if not {"key", "version"} <= column_names(connection, SOURCE_TOTALS):
            raise Failure(
                f"the source has no view {SOURCE_TOTALS} with columns key and version",
                "add it in a migration: docs/adopting.md",
                code="rebuild-unsupported",
            )
        with connection.cursor("totals") as cursor:  # on the server: they may be more than memory holds
            cursor.itersize = FETCH_ROWS
            cursor.execute("SELECT to_jsonb(one)::text FROM source_totals AS one")
            yield from cursor


def _skip(cursor: extensions.cursor, sink: str, topic: Topic, first: Offsets) -> dict[int, tuple[int, int]]:
    """Let the sink continue behind what the topic has dropped, and return that range.

    Its checkpoint begins again there, so a driver that still runs must not continue from elsewhere.
    """
    stored = positions.read(cursor, sink, topic.name, topic.id)
    begin = {partition: max(offset, stored.get(partition, 0)) for partition, offset in first.items()}
    skipped = {
        partition: (stored.get(partition, 0), offset - 1)
        for partition, offset in begin.items()
        if stored and offset > stored.get(partition, 0)
    }
    if skipped:
        positions.write(cursor, sink, topic.name, topic.id, begin)
        fence.supersede(cursor, sink)
        generations.start_next(cursor, sink, topic.name, begin)
    return skipped


def _require_this_topic(cursor: extensions.cursor, sink: str, topic: Topic) -> None:
    cursor.execute("SELECT FROM sinks WHERE name = %s", (sink,))
    if not cursor.rowcount:
        raise Failure(
            f"no sink called {sink} has run yet", f"`outbox sink --strategy {sink}` runs it", code="sink-unknown"
        )
    cursor.execute("SELECT DISTINCT topic, topic_id FROM positions WHERE sink = %s", (sink,))
    others = {name for name, of_topic in cursor if (name, of_topic) != (topic.name, topic.id)}
    if others:
        raise Failure(
            f"sink {sink} holds events of another topic ({', '.join(sorted(others))}), recreated or replaced since",
            FROM_SOURCE.format(sink),
            code="topic-recreated",
        )


def _tables(cursor: extensions.cursor) -> list[sql.Identifier]:
    """The tables that hold rows of sinks."""
    cursor.execute(TABLES, (KEPT,))
    return [sql.Identifier("public", name) for (name,) in cursor.fetchall()]


def _delete(cursor: extensions.cursor, sink: str) -> None:
    for table in _tables(cursor):
        cursor.execute(sql.SQL("DELETE FROM {} WHERE sink = %s").format(table), (sink,))


def _errors(connection: extensions.connection, sink: str) -> AbstractContextManager[None]:
    return database_errors(connection, f"sink {sink}", "refused the rebuild, all of it", AGAIN)
