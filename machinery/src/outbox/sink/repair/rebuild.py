"""Recompute what a sink holds, from the source or from the topic.

**From the source**: its state as it is now becomes the sink's, in one transaction beside the running sink. A file
``NAME.rebuild.sql`` of the project sets a table, or a comparison of rows that declares the table by a line
``-- table:``: a row that differs is deleted and inserted with the columns of ``[source]``, and a row that the source
does not have is deleted. The version of each key at that moment becomes its base version. The sink's lock comes before
the source's snapshot, so the snapshot has whatever the sink has applied. Any other event that is in the snapshot
arrives with a version that is not above the base, and the sink drops it as a duplicate.

The source may have been restored from a backup. Then the sink has applied versions that it does not have, and gives to
other events next. So the base is just the source's version, and what the strategy remembers of higher ones is
forgotten. Those earlier events come again only if the sink reads what it has read before. So it drops what it had
passed by then of keys that have a base.

**From the topic**: a copy of the sink, by the engine itself under a name of its own, reads the topic from its first
event, beside the live sink. Then it replaces the live sink in one transaction. Interrupted before that, the live sink
is unchanged, and the copy resumes where it stopped.

A topic without its beginning is refused, because the copy would lack what is gone: one that has dropped records, and
one that was deleted and created again since the sink has applied events of it. So is a sink that has applied events of
a topic that its job no longer reads.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from decimal import Decimal
from pathlib import Path
from typing import NamedTuple

from psycopg2 import extensions, sql
from psycopg2.extras import execute_values

from outbox.base.database import column_names, connect, database_errors, naming
from outbox.base.errors import Failure
from outbox.base.sections import COMMENT
from outbox.base.settings import Settings, SinkRole, SourceRole
from outbox.events import catalog
from outbox.events.catalog import Aggregate
from outbox.kafka.topics import Topic
from outbox.sink import comparison_files, rows
from outbox.sink.applying import projection
from outbox.sink.comparison_files import Comparison, StateTable
from outbox.sink.remembering import asked, dead_letters, fence, positions
from outbox.sink.remembering.positions import TopicOffsets
from outbox.sink.remembering.strategy import Memory
from outbox.sink.rows import Difference, Differences, query_errors, unusable
from outbox.sink.spec import SinkSpec

AGAIN = "run the command again"
FROM_SOURCE = "`outbox rebuild {} --from source`"

REBUILD_KEY = "hashtextextended('outbox rebuild of sink ' || %(sink)s, 0)"
# Never deleted and never renamed: it records which checkpoints were used, so that each copy gets an unused one.
KEPT = "checkpoint_generations"
TABLES = """
SELECT relname FROM pg_class JOIN pg_attribute ON attrelid = pg_class.oid
 WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p') AND NOT relispartition
   AND attname = 'sink' AND NOT attisdropped AND relname <> %s
 ORDER BY relname
"""
ADD_COPY = """
INSERT INTO public.sinks (name, epoch, generation)
SELECT %(copy)s, 0, coalesce(max(generation), 0) FROM public.checkpoint_generations WHERE sink = %(copy)s
ON CONFLICT DO NOTHING
"""
# Rows as they are, but for their sink.
COPY_ROWS = """
INSERT INTO {table} (sink, {columns}) SELECT %(copy)s, {columns} FROM {table} WHERE sink = %(sink)s AND {condition}
ON CONFLICT DO NOTHING
"""
# Events that were discarded while the copy was made, and that the copy has passed by and not set aside: it has applied
# them.
APPLIED_ALL_THE_SAME = """
SELECT live.identity
  FROM public.dead_letters AS live
  JOIN public.positions AS read ON read.sink = %(copy)s AND read.topic = live.topic AND read.topic_id = live.topic_id
                               AND read.partition = live.partition AND live."offset" < read.next_offset
 WHERE live.sink = %(sink)s AND live.status = 'discarded'
   AND NOT EXISTS (SELECT FROM public.dead_letters AS letter
                    WHERE letter.sink = %(copy)s AND letter.identity = live.identity
                      AND letter.status IN ('open', 'discarded'))
 ORDER BY live.identity
 LIMIT 1
"""
DROP_DISCARDED = """
DELETE FROM public.dead_letters AS letter
 USING public.dead_letters AS live
 WHERE letter.sink = %(copy)s AND letter.status = 'open'
   AND live.sink = %(sink)s AND live.identity = letter.identity AND live.status = 'discarded'
"""
UNREAD = """
SELECT DISTINCT topic FROM public.positions WHERE sink = %s AND topic <> ALL(%s) AND next_offset > 0 ORDER BY topic
"""
SOURCE = "CREATE TEMPORARY TABLE source (aggregate text NOT NULL, total jsonb NOT NULL) ON COMMIT DROP"
# What the outbox has of keys that are gone from the source: a snapshot of it sends these events again.
SENT = """
CREATE TEMPORARY TABLE outbox_sent (aggregate text NOT NULL, key text NOT NULL, version bigint NOT NULL) ON COMMIT DROP
"""
OUTBOX = """
SELECT aggregatetype, aggregateid, max((payload ->> %(version)s)::bigint)
  FROM public.outbox
 WHERE aggregatetype = %(aggregate)s AND jsonb_typeof(payload -> %(version)s) = 'number'
 GROUP BY 1, 2
"""
# Just the source's version, also if that is lower than before: the source may have been restored. It is 0 for a key
# that the sink knows and the source does not.
SET_BASES = """
INSERT INTO public.base_versions (sink, topic, key, version)
SELECT %(sink)s, %(topic)s, key, max(version)
  FROM (SELECT total ->> 'key' AS key, (total ->> 'version')::bigint AS version
          FROM pg_temp.source WHERE aggregate = ANY(%(aggregates)s)
         UNION ALL
        SELECT key, version FROM pg_temp.outbox_sent WHERE aggregate = ANY(%(aggregates)s)
         UNION ALL
        SELECT key, 0 FROM public.base_versions WHERE sink = %(sink)s AND topic = %(topic)s {known}) AS found
 GROUP BY key ORDER BY key
ON CONFLICT (sink, topic, key) DO UPDATE SET version = excluded.version
"""
# The state from before a key was erased. A source that does not know its version has only later ones.
DROP_ERASED = """
DELETE FROM pg_temp.source AS source USING public.erased_keys AS erased
 WHERE source.aggregate = ANY(%(aggregates)s) AND erased.topic = %(topic)s
   AND erased.key_hash = sha256(convert_to(source.total ->> 'key', 'UTF8'))
   AND (source.total ->> 'version')::bigint <= erased.version
"""
KNOWN = """
         UNION ALL
        SELECT key COLLATE "default", 0 FROM public.{table} WHERE sink = %(sink)s AND topic = %(topic)s
"""
# What the strategy remembers by key and version must not go beyond the base: new events take these versions.
FORGET = {
    "version": "version = least(known.version, base.version)",
    "versions": "versions = known.versions * int8multirange(int8range(NULL, base.version, '[]'))",
}
FORGET_BEYOND = """
UPDATE public.{table} AS known SET {forget}
  FROM public.base_versions AS base
 WHERE known.sink = %(sink)s AND known.topic = %(topic)s
   AND base.sink = %(sink)s AND base.topic = %(topic)s AND base.key = known.key COLLATE "default"
"""
# The sink has passed their events, so these are part of the source's state, or of a time that the source has forgotten.
# Letters of invalid records stay open: a replay, or a valid record of the event, closes them.
BASED = """
SELECT DISTINCT letter.identity
  FROM public.base_versions AS base, public.dead_letters AS letter
 WHERE base.sink = %(sink)s AND letter.sink = %(sink)s AND letter.status = 'open'
   AND base.topic = %(topic)s AND letter.topic = %(topic)s
   AND letter.key = convert_to(base.key, 'UTF8') AND letter.is_event
"""
SET_PASSED = "UPDATE public.positions SET based = next_offset WHERE sink = %s AND topic = ANY(%s)"
TAKE_COUNTS = """
UPDATE public.sinks SET applied = copy.applied, duplicates = copy.duplicates, filtered = copy.filtered,
                        skipped = copy.skipped, asked_for = copy.asked_for
  FROM public.sinks AS copy WHERE sinks.name = %(sink)s AND copy.name = %(copy)s
"""
# The tables that SQL writes. `rejections` is one of the engine.
WRITES = re.compile(
    r"\b(?:INSERT\s+INTO|MERGE\s+INTO|DELETE\s+FROM|(?<!FOR )UPDATE(?!\s+SET\b))"
    r'\s+(?:ONLY\s+)?(?:public\.)?"?(\w+)',
    re.IGNORECASE,
)
OF_ENGINE = {"rejections"}
TABLE_COLUMNS = """
SELECT attname, atthasdef OR attidentity <> '' FROM pg_attribute
 WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped
"""
STATES = "SELECT to_jsonb(compared.*)::text FROM (\n{query}\n) AS compared WHERE compared.key IS NOT NULL"
TRUTH = "CREATE TEMPORARY TABLE outbox_truth ON COMMIT DROP AS SELECT * FROM {table} WITH NO DATA"
# Without states from before their key was erased, as DROP_ERASED. A state without a version may be one.
FILL = """
INSERT INTO pg_temp.outbox_truth
SELECT made.* FROM (VALUES %s) AS found (state), jsonb_populate_record(NULL::{table},
       state::jsonb - 'key' || jsonb_build_object('sink', {sink}, {key_name}, state::jsonb -> 'key')) AS made
 WHERE NOT EXISTS (SELECT FROM public.erased_keys AS erased
                    WHERE erased.topic = ANY({topics})
                      AND erased.key_hash = sha256(convert_to(state::jsonb ->> 'key', 'UTF8'))
                      AND erased.version IS NOT NULL
                      AND coalesce((state::jsonb ->> 'version')::bigint <= erased.version, true))
"""
CHANGED = """
CREATE TEMPORARY TABLE outbox_changed ON COMMIT DROP AS
SELECT coalesce(truth.{key}, stored.{key}) AS key,
       to_jsonb(truth.*) - {others} AS due, to_jsonb(stored.*) - {others} AS has
  FROM pg_temp.outbox_truth AS truth
  FULL JOIN (SELECT * FROM {table} WHERE sink = {sink}) AS stored ON stored.{key} = truth.{key}
 WHERE to_jsonb(truth.*) - {others} IS DISTINCT FROM to_jsonb(stored.*) - {others}
"""
DIFFERENCES = "SELECT key::text, due::text, has::text FROM pg_temp.outbox_changed"
REPLACE = """
DELETE FROM {table} AS stored USING pg_temp.outbox_changed AS changed
 WHERE stored.sink = {sink} AND stored.{key} = changed.key;

INSERT INTO {table} (sink, {key}, {columns})
SELECT truth.sink, truth.{key}, {of_truth}
  FROM pg_temp.outbox_truth AS truth JOIN pg_temp.outbox_changed AS changed ON changed.key = truth.{key}
 ORDER BY truth.{key};

DROP TABLE pg_temp.outbox_truth, pg_temp.outbox_changed;
"""


class RebuildResult(NamedTuple):
    """The changes by a rebuild from the source: by key how much more the sink holds now, where that is not zero; by
    topic and partition the first and last offset of events that the topic has dropped before the sink applied them; and
    by comparison how rows differed.
    """

    differences: dict[str, Decimal]
    skipped: dict[tuple[str, int], tuple[int, int]]
    rows: Mapping[str, Differences] = {}


def copy_of(sink: str) -> str:
    """The name of the copy that a rebuild from the topic makes."""
    return f"{sink}{positions.COPY_SUFFIX}"


def from_source(
    settings: Settings,
    spec: SinkSpec,
    topics: Sequence[Topic],
    first: TopicOffsets,
    *,
    dry_run: bool = False,
    kept: int = rows.KEPT,
) -> RebuildResult:
    """Set what a sink holds to what the source says, in one transaction. With ``dry_run`` it is rolled back.

    ``first`` are the topic's first offsets, asked for before: what the topic has dropped by then is in the source, so a
    sink that stands before them continues there at its next start. Its counts and what it remembers of events stay, but
    for versions that the source does not have.

    A key that the source does not have gets a base version too, if the outbox still has events of it. Of the rows that
    differ, the worst are ``kept`` in the result.

    Raises Failure if nothing says how to rebuild a projection, if its events or the source's totals have no version, or
    if a database refuses.
    """
    sink = spec.name
    files, tables = projection.rebuild_files(spec.job.projections), derived_tables(spec)
    aggregates = _aggregates(settings, spec)
    if not spec.has_version:
        raise _unsupported(sink, "its events have no version")
    with closing(connect(settings, SinkRole.WRITER)) as connection, _errors(connection, sink):
        with connection, connection.cursor() as cursor:
            cursor.execute(fence.SESSION)
        with connection, connection.cursor() as cursor:
            fence.lock(cursor, sink)
            cursor.execute(f"{SOURCE}; {SENT}")
            changed = dict[str, Differences]()
            with closing(connect(settings, SourceRole.AUDITOR)) as source:
                source.set_session(isolation_level="REPEATABLE READ", readonly=True)
                found = {"source": _totals(source, aggregates), "outbox_sent": _sent(source, aggregates)}
                for table, read in found.items():
                    insert = f"INSERT INTO pg_temp.{table} VALUES %s"  # noqa: S608
                    execute_values(cursor, insert, read, page_size=rows.FETCH_ROWS)
                for one in tables:
                    changed[one.name] = _set_rows(cursor, source, one, spec, kept)
            for topic in spec.topics:
                of_topic = [aggregate.name for aggregate in aggregates if aggregate.topic == topic]
                names = {"sink": sink, "topic": topic, "aggregates": of_topic}
                cursor.execute(DROP_ERASED, names)
                _set_bases(cursor, spec.strategy.memory, names)
            is_another_job = asked.decide(cursor, spec.asked)
            differences: dict[str, Decimal] = {}
            for file in files:
                with naming(file):
                    cursor.execute(file.read_text(), {"sink": sink})
                differences |= {str(key): difference for key, difference in cursor}
            skipped = _skip(cursor, sink, topics, first, restart=is_another_job)
            cursor.execute(SET_PASSED, (sink, spec.topics))
            if dry_run:
                connection.rollback()
            return RebuildResult(differences, skipped, changed)


def derived_tables(spec: SinkSpec) -> list[Comparison]:
    """The comparisons that a sink's tables follow from: they declare tables of projections without a file
    ``NAME.rebuild.sql``.

    Raises Failure if nothing says how to rebuild a projection, or if a comparison cannot be used.
    """
    declared = dict[str, Comparison]()
    for one in comparison_files.load(spec):
        if one.table is not None and (first := declared.setdefault(one.table.name, one)) is not one:
            raise unusable(one.file, f"{first.file.name} declares table {one.table.name} too", "keep one")
    found, missing = set[str](), list[str]()
    for name in projection.without_rebuild(spec.job.projections):
        written = _written(spec.job.projections, name)
        found |= written & declared.keys()
        if not written or not written <= declared.keys():
            tables = ", ".join(sorted(written - declared.keys())) or "its table"
            missing.append(f"{name}.rebuild.sql, and no comparison with `-- table: {tables} (…)`")
    if missing:
        raise _unsupported(spec.name, f"{spec.job.projections} has no {', no '.join(missing)}")
    if not found and not projection.rebuild_files(spec.job.projections):
        raise _unsupported(spec.name, f"{spec.job.projections} has no projections")
    return [declared[name] for name in sorted(found)]


def _written(folder: Path, name: str) -> set[str]:
    files = (folder / f"{name}.sql", folder / f"{name}.states.sql")
    texts = [COMMENT.sub("", file.read_text()) for file in files if file.exists()]
    return {table for text in texts for table in WRITES.findall(text)} - OF_ENGINE


def _set_rows(
    cursor: extensions.cursor, source: extensions.connection, comparison: Comparison, spec: SinkSpec, kept: int
) -> Differences:
    """Set a sink's rows of the table of a comparison to those of the source, and return how they differed.

    Raises Failure if the query cannot be used, or does not return every column that has no default.
    """
    table = comparison.table
    assert table is not None, "declared"  # noqa: S101
    cursor.execute(TABLE_COLUMNS, [f'public."{table.name}"'])
    has_default = dict(cursor.fetchall())
    with query_errors(source, comparison.file):
        columns = _columns(comparison.file, table, rows.columns_of(source, comparison.source), has_default)
    names = {
        "table": sql.Identifier("public", table.name),
        "sink": sql.Literal(spec.name),
        "topics": sql.Literal(list(spec.topics)),
        "key": sql.Identifier(table.key),
        "key_name": sql.Literal(table.key),
        "columns": sql.SQL(", ").join(map(sql.Identifier, columns)),
        "of_truth": sql.SQL(", ").join(sql.Identifier("truth", name) for name in columns),
        "others": sql.Literal([name for name in has_default if name not in columns]),
    }
    truth, fill, changed, replace = (sql.SQL(one).format(**names) for one in (TRUTH, FILL, CHANGED, REPLACE))
    cursor.execute(truth)
    with query_errors(source, comparison.file):
        states = rows.stream(source, sql.SQL(STATES).format(query=sql.SQL(comparison.source)))
        execute_values(cursor, fill.as_string(cursor), states, page_size=rows.FETCH_ROWS)
    cursor.execute(changed)
    differences = Differences(kept=kept)
    for key, due, has in rows.stream(cursor.connection, DIFFERENCES):
        difference = Difference.of(key, due and rows.normal(due), has and rows.normal(has))
        differences.add(difference.without_values if spec.is_personal else difference)
    cursor.execute(replace)
    return differences


def _columns(file: Path, table: StateTable, returned: Sequence[str], has_default: Mapping[str, bool]) -> list[str]:
    """The columns to set. Raises Failure if they are not those of the table."""
    columns = [name for name in returned if name != "key"]
    known = has_default.keys() - {"sink", table.key}
    problem = "" if columns else "it returns no column to set"
    if unknown := [name for name in columns if name not in known]:
        problem = f"table {table.name} has no column {', '.join(unknown)}"
    elif lacking := sorted(name for name in known if name not in columns and not has_default[name]):
        problem = f"it does not return {', '.join(lacking)} of table {table.name}, without a default"
    if problem:
        raise Failure(
            f"{file}: {problem}",
            "correct the query, or write a file NAME.rebuild.sql beside the projection",
            code="rebuild-unsupported",
        )
    return columns


@contextmanager
def reserved(settings: Settings, sink: str) -> Iterator[extensions.connection]:
    """A connection to make the copy of a sink and swap it in. Nobody else can do so meanwhile.

    It is the owner's, because a sink's role may not delete. Raises Failure if another rebuild of the sink runs.
    """
    with closing(connect(settings, SinkRole.OWNER)) as connection, _errors(connection, sink):
        if not fence.hold_for_session(connection, sink, REBUILD_KEY):
            raise Failure(
                f"sink {sink} is being rebuilt already", "wait until that ends, or stop it", code="rebuild-running"
            )
        yield connection


def begin(connection: extensions.connection, sink: str, topics: Sequence[Topic], first: TopicOffsets) -> bool:
    """Prepare the copy, unless there is one already, and return whether there is.

    It has taken over what was discarded. It begins at offset 0. These positions are stored, so that it will not begin
    behind events that are dropped between now and then.

    Raises Failure if there is nothing to copy, if a topic no longer has its beginning, or if the copy has read
    other topics.
    """
    copy = copy_of(sink)
    with connection, connection.cursor() as cursor:
        fence.lock_new(cursor, copy)
        _require_these_topics(cursor, sink, topics)
        if copied := _topics_of(cursor, copy):
            if copied != {(topic.name, topic.id) for topic in topics}:
                raise Failure(
                    f"the copy of sink {sink} has read other topics than these, or earlier ones of these names: "
                    f"{', '.join(sorted(name for name, _ in copied))}",
                    positions.remedy(copy),
                    code="copy-outdated",
                )
            return True
        dropped = [
            f"{topic.name}, partition {partition} begins at offset {offset}"
            for topic in topics
            for partition, offset in first[topic.name].items()
            if offset
        ]
        if dropped:
            raise Failure(
                f"the topic does not have every event any more: {', '.join(dropped)}",
                FROM_SOURCE.format(sink),
                code="topic-incomplete",
            )
        cursor.execute(ADD_COPY, {"copy": copy})
        start = {topic.name: dict.fromkeys(first[topic.name], 0) for topic in topics}
        for topic in topics:
            positions.write(cursor, copy, topic.name, topic.id, start[topic.name])
        positions.start_generation(cursor, copy, start)
        _copy_rows(cursor, {"sink": sink, "copy": copy}, "dead_letters", "status = 'discarded'")
        return False


def _copy_rows(cursor: extensions.cursor, names: Mapping[str, str], table: str, condition: str = "true") -> None:
    """Let the copy have these rows of the live sink too, but for those that it has."""
    columns = column_names(cursor.connection, table) - {"sink"}
    statement = sql.SQL(COPY_ROWS).format(
        table=sql.Identifier("public", table),
        columns=sql.SQL(", ").join(map(sql.Identifier, sorted(columns))),
        condition=sql.SQL(condition),
    )
    cursor.execute(statement, names)


def drop_copy(connection: extensions.connection, sink: str) -> bool:
    """Delete the copy of a sink, and return whether there was one."""
    copy = copy_of(sink)
    with connection, connection.cursor() as cursor:
        fence.lock(cursor, copy)
        _delete(cursor, copy)
        cursor.execute("DELETE FROM public.sinks WHERE name = %s", (copy,))
        return bool(cursor.rowcount)


def swap(connection: extensions.connection, sink: str, topics: Sequence[Topic], first: TopicOffsets) -> int:
    """Let the copy take the sink's place, in one transaction, and return the generation of its next checkpoint.

    A running driver is superseded: it stops at its next batch, and starts again where the copy has ended.
    Every table with a column ``sink`` takes part, the project's own included.

    Raises Failure, with nothing changed, if there is no copy, if the topic has dropped what comes after it, if the sink
    has applied events of another topic, if the copy has applied an event that was discarded since, or if the database
    refuses.
    """
    names = {"sink": sink, "copy": copy_of(sink)}
    with connection, connection.cursor() as cursor:
        for name in names.values():
            fence.lock(cursor, name)
        _require_these_topics(cursor, sink, topics)
        reached = {topic.name: positions.read(cursor, names["copy"], topic.name, topic.id) for topic in topics}
        if not all(reached.values()):
            raise Failure(f"there is no copy of sink {sink}", AGAIN, code="copy-missing")
        for topic in topics:
            positions.require_no_gap(names["copy"], topic.name, reached[topic.name], first[topic.name])
        _discard(cursor, names)
        _delete(cursor, sink)
        for table in _tables(cursor):
            cursor.execute(sql.SQL("UPDATE {} SET sink = %(sink)s WHERE sink = %(copy)s").format(table), names)
        cursor.execute(TAKE_COUNTS, names)
        cursor.execute("DELETE FROM public.sinks WHERE name = %(copy)s", names)
        fence.supersede(cursor, sink)
        return positions.start_generation(cursor, sink, reached)


def _discard(cursor: extensions.cursor, names: Mapping[str, str]) -> None:
    """Let the copy have given up whatever the live sink has."""
    cursor.execute(APPLIED_ALL_THE_SAME, names)
    for (identity,) in cursor:
        raise Failure(
            f"the copy of sink {names['sink']} has applied {identity}, which was discarded since",
            positions.remedy(names["copy"]),
            code="copy-outdated",
        )
    cursor.execute(DROP_DISCARDED, names)
    _copy_rows(cursor, names, "dead_letters", "status = 'discarded'")


def _aggregates(settings: Settings, spec: SinkSpec) -> list[Aggregate]:
    """The aggregates of the sink's events. Raises Failure if one does not say where its state is in the source."""
    known = catalog.of_project(settings)
    names = {known_event.schema.aggregate for known_event in known.wanted(spec.job.events)}
    found = [known.aggregates[name] for name in sorted(names)]
    without = [aggregate.name for aggregate in found if aggregate.source is None]
    if without or not found:
        raise _unsupported(spec.name, f"no `source` in aggregate.toml of {', '.join(without) or 'its events'}")
    return found


def _unsupported(sink: str, lack: str) -> Failure:
    return Failure(
        f"sink {sink} cannot be taken from the source: {lack}",
        f"`outbox rebuild {sink} --from topic` takes it from the events",
        code="rebuild-unsupported",
    )


def _set_bases(cursor: extensions.cursor, memory: Memory | None, names: Mapping[str, object]) -> None:
    """Set the base of each key of a topic, and let nothing of the sink go beyond it."""
    of_keys = memory if memory is not None and memory.is_of_keys else None
    known = "" if of_keys is None else KNOWN.format(table=of_keys.table)
    cursor.execute(SET_BASES.format(known=known), names)
    if of_keys is not None:
        cursor.execute(FORGET_BEYOND.format(table=of_keys.table, forget=FORGET[of_keys.by[1]]), names)
    cursor.execute(BASED, names)
    dead_letters.close(cursor, str(names["sink"]), [identity for (identity,) in cursor])


def _totals(connection: extensions.connection, aggregates: Sequence[Aggregate]) -> Iterator[tuple[str, str]]:
    """By aggregate the state of each key as JSON."""
    for aggregate in aggregates:
        view = str(aggregate.source)
        if not {"key", "version"} <= column_names(connection, view):
            raise Failure(
                f"the source has no view {view} with columns key and version",
                "add it in a migration: docs/projections.md",
                code="rebuild-unsupported",
            )
        query = sql.SQL("SELECT to_jsonb(one.*)::text FROM {} AS one").format(sql.Identifier("public", view))
        for (total,) in rows.stream(connection, query):
            yield aggregate.name, total


def _sent(connection: extensions.connection, aggregates: Sequence[Aggregate]) -> Iterator[tuple[str, str, int]]:
    """By aggregate and key, the highest version of the events that the outbox still has."""
    for aggregate in aggregates:
        yield from rows.stream(connection, sql.SQL(OUTBOX), {"aggregate": aggregate.name, "version": aggregate.version})


def _skip(
    cursor: extensions.cursor, sink: str, topics: Sequence[Topic], first: TopicOffsets, *, restart: bool
) -> dict[tuple[str, int], tuple[int, int]]:
    """Let the sink continue behind what its topics have dropped, and return these ranges.

    Its checkpoint begins again there, so a driver that still runs must not continue from elsewhere. With ``restart``
    such a driver is superseded in any case: it runs the job before.
    """
    stored = {topic.name: positions.read(cursor, sink, topic.name, topic.id) for topic in topics}
    begin = {
        topic: {partition: max(offset, stored[topic].get(partition, 0)) for partition, offset in of_topic.items()}
        for topic, of_topic in first.items()
    }
    skipped = {
        (topic, partition): (stored[topic].get(partition, 0), offset - 1)
        for topic, of_topic in begin.items()
        for partition, offset in of_topic.items()
        if stored[topic] and offset > stored[topic].get(partition, 0)
    }
    if skipped or restart:
        for topic in topics:
            positions.write(cursor, sink, topic.name, topic.id, begin[topic.name])
        fence.supersede(cursor, sink)
        positions.start_generation(cursor, sink, begin)
    return skipped


def _topics_of(cursor: extensions.cursor, sink: str) -> set[tuple[str, str]]:
    """Name and id of each topic that a sink has positions of."""
    cursor.execute("SELECT DISTINCT topic, topic_id FROM public.positions WHERE sink = %s", (sink,))
    return {(name, id_) for name, id_ in cursor}


def _require_these_topics(cursor: extensions.cursor, sink: str, topics: Sequence[Topic]) -> None:
    cursor.execute("SELECT FROM public.sinks WHERE name = %s", (sink,))
    if not cursor.rowcount:
        raise Failure(f"no sink called {sink} has run yet", f"`outbox sink {sink}` runs it", code="sink-unknown")
    cursor.execute("SELECT DISTINCT topic, topic_id, is_recreated FROM public.positions WHERE sink = %s", (sink,))
    known = {topic.name: topic.id for topic in topics}
    others = {name for name, of_topic, is_later in cursor if is_later or known.get(name, of_topic) != of_topic}
    if others:
        raise Failure(
            f"sink {sink} holds events of a topic that was recreated since: {', '.join(sorted(others))}",
            FROM_SOURCE.format(sink),
            code="topic-recreated",
        )
    cursor.execute(UNREAD, (sink, list(known)))
    if unread := [name for (name,) in cursor]:
        raise Failure(
            f"sink {sink} has applied events of topics that its job does not read: {', '.join(unread)}",
            f"{FROM_SOURCE.format(sink)}; or give the job another name: a new sink has only what its topics have",
            code="topic-incomplete",
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
