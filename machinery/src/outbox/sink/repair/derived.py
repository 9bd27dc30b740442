"""Set a projection's table to the rows of the source, as a comparison of rows declares both (`outbox.sink.rows`).

A row that differs is replaced: deleted, and inserted with the columns of ``[source]``. Other columns get their
defaults. A row that the source does not have is deleted. The sink's role needs SELECT, INSERT and DELETE.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from psycopg2 import extensions, sql
from psycopg2.extras import execute_values

from outbox.base.errors import Failure
from outbox.base.sections import COMMENT
from outbox.sink import rows
from outbox.sink.applying import projection
from outbox.sink.rows import Difference, Differences, StateTable, query_errors
from outbox.sink.spec import SinkSpec

FETCH_ROWS = 10_000
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
BEGIN = "CREATE TEMPORARY TABLE outbox_states (state jsonb NOT NULL) ON COMMIT DROP"
# The state from before a key was erased.
DROP_ERASED = """
DELETE FROM pg_temp.outbox_states USING public.erased_keys AS erased
 WHERE erased.topic = ANY(%(topics)s) AND erased.key_hash = sha256(convert_to(state ->> 'key', 'UTF8'))
   AND coalesce((state ->> 'version')::bigint <= erased.version, true)
"""
TRUTH = """
CREATE TEMPORARY TABLE outbox_truth ON COMMIT DROP AS
SELECT made.*
  FROM pg_temp.outbox_states,
       jsonb_populate_record(NULL::{table},
                             state - 'key' || jsonb_build_object('sink', %(sink)s, {key_name}, state -> 'key')) AS made
"""
CHANGED = """
CREATE TEMPORARY TABLE outbox_changed ON COMMIT DROP AS
SELECT coalesce(truth.{key}, stored.{key}) AS key, to_jsonb(truth.*) - %(others)s::text[] AS due,
       to_jsonb(stored.*) - %(others)s::text[] AS has
  FROM pg_temp.outbox_truth AS truth
  FULL JOIN (SELECT * FROM {table} WHERE sink = %(sink)s) AS stored ON stored.{key} = truth.{key}
 WHERE to_jsonb(truth.*) - %(others)s::text[] IS DISTINCT FROM to_jsonb(stored.*) - %(others)s::text[]
"""
REPLACE = """
DELETE FROM {table} AS stored USING pg_temp.outbox_changed AS changed
 WHERE stored.sink = %(sink)s AND stored.{key} = changed.key;

INSERT INTO {table} (sink, {key}, {columns})
SELECT truth.sink, truth.{key}, {of_truth}
  FROM pg_temp.outbox_truth AS truth JOIN pg_temp.outbox_changed AS changed ON changed.key = truth.{key}
 ORDER BY truth.{key};
"""
END = "DROP TABLE pg_temp.outbox_states, pg_temp.outbox_truth, pg_temp.outbox_changed"


class Derived(NamedTuple):
    """A table that a comparison declares, and the query of its rows in the source."""

    file: Path
    table: StateTable
    query: str


def derived(spec: SinkSpec) -> list[Derived]:
    """The tables of a sink that follow from comparisons: those of projections without a file ``NAME.rebuild.sql``.

    Raises FileNotFoundError if nothing says how to rebuild a projection, Failure if a comparison cannot be used.
    """
    declared = _declared(spec)
    found = dict[str, Derived]()
    missing = list[str]()
    for name in projection.without_rebuild(spec.job.projections):
        written = _written(spec.job.projections, name)
        found |= {table: declared[table] for table in written & declared.keys()}
        if not written or not written <= declared.keys():
            tables = ", ".join(sorted(written - declared.keys())) or "its table"
            missing.append(f"{name}.rebuild.sql, and no comparison with `-- table: {tables} (…)`")
    if missing:
        raise FileNotFoundError(f"{spec.job.projections} has no {', no '.join(missing)}")
    if not found and not projection.rebuild_files(spec.job.projections):
        raise FileNotFoundError(f"{spec.job.projections} has no projections")
    return [found[name] for name in sorted(found)]


def _declared(spec: SinkSpec) -> dict[str, Derived]:
    found = dict[str, Derived]()
    for file in sorted(rows.folder_of(spec).glob("*.sql")):
        table = rows.state_table(file)
        if table is None:
            continue
        if table.name in found:
            raise rows.unusable(file, f"{found[table.name].file.name} declares table {table.name} too", "keep one")
        found[table.name] = Derived(file, table, rows.source_query(file))
    return found


def _written(folder: Path, name: str) -> set[str]:
    files = (folder / f"{name}.sql", folder / f"{name}.states.sql")
    texts = [COMMENT.sub("", file.read_text()) for file in files if file.exists()]
    return {table for text in texts for table in WRITES.findall(text)} - OF_ENGINE


def settle(
    cursor: extensions.cursor, source: extensions.connection, one: Derived, spec: SinkSpec, kept: int = rows.KEPT
) -> Differences:
    """Set a sink's rows of a table to those of the source, and return how they differed.

    Raises Failure if the query cannot be used, or does not return every column that has no default.
    """
    with query_errors(source, one.file):
        returned = rows.columns_of(source, one.query)
        cursor.execute(BEGIN)
        insert = "INSERT INTO pg_temp.outbox_states VALUES %s"
        execute_values(cursor, insert, _states(source, one), page_size=FETCH_ROWS)
    cursor.execute(DROP_ERASED, {"topics": spec.topics})
    cursor.execute(TABLE_COLUMNS, [f'public."{one.table.name}"'])
    has_default = dict(cursor.fetchall())
    columns = _columns(one, returned, has_default)
    names = {
        "table": sql.Identifier("public", one.table.name),
        "key": sql.Identifier(one.table.key),
        "key_name": sql.Literal(one.table.key),
        "columns": sql.SQL(", ").join(map(sql.Identifier, columns)),
        "of_truth": sql.SQL(", ").join(sql.Identifier("truth", name) for name in columns),
    }
    values = {"sink": spec.name, "others": [name for name in has_default if name not in columns]}
    for statement in (TRUTH, CHANGED):
        cursor.execute(sql.SQL(statement).format(**names), values)
    differences = Differences(kept=kept)
    for key, due, has in _changed(cursor.connection):
        difference = Difference.of(key, due and rows.normal(due), has and rows.normal(has))
        differences.add(difference.shown(spec.shown))
    cursor.execute(sql.SQL(REPLACE).format(**names), values)
    cursor.execute(END)
    return differences


def _states(source: extensions.connection, one: Derived) -> Iterator[tuple[str]]:
    with source.cursor("states") as cursor:
        cursor.itersize = FETCH_ROWS
        cursor.execute(sql.SQL(STATES).format(query=sql.SQL(one.query)))
        yield from cursor


def _changed(connection: extensions.connection) -> Iterator[tuple[str, str | None, str | None]]:
    with connection.cursor("changed") as cursor:
        cursor.itersize = FETCH_ROWS
        cursor.execute("SELECT key::text, due::text, has::text FROM pg_temp.outbox_changed")
        yield from cursor


def _columns(one: Derived, returned: Sequence[str], has_default: Mapping[str, bool]) -> list[str]:
    """The columns to set. Raises Failure if they are not those of the table."""
    columns = [name for name in returned if name != "key"]
    known = has_default.keys() - {"sink", one.table.key}
    problem = "" if columns else "it returns no column to set"
    if unknown := [name for name in columns if name not in known]:
        problem = f"table {one.table.name} has no column {', '.join(unknown)}"
    elif lacking := sorted(name for name in known if name not in columns and not has_default[name]):
        problem = f"it does not return {', '.join(lacking)} of table {one.table.name}, without a default"
    if problem:
        raise Failure(
            f"{one.file}: {problem}",
            "correct the query, or write a file NAME.rebuild.sql beside the projection",
            code="rebuild-unsupported",
        )
    return columns
