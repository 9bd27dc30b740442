"""Set a projection's table to the rows of the source: a comparison of rows declares both by a line ``-- table:``.

A row that differs is replaced: deleted, and inserted with the columns of ``[source]``. Other columns get their
defaults. A row that the source does not have is deleted. The sink's role needs SELECT, INSERT and DELETE.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from psycopg2 import extensions, sql
from psycopg2.extras import execute_values

from outbox.base.errors import Failure
from outbox.base.sections import COMMENT
from outbox.sink import comparison_files, rows
from outbox.sink.applying import projection
from outbox.sink.comparison_files import Comparison, StateTable
from outbox.sink.rows import Difference, Differences, query_errors, unusable
from outbox.sink.spec import SinkSpec

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
# Without states from before their key was erased.
FILL = """
INSERT INTO pg_temp.outbox_truth
SELECT made.* FROM (VALUES %s) AS found (state), jsonb_populate_record(NULL::{table},
       state::jsonb - 'key' || jsonb_build_object('sink', {sink}, {key_name}, state::jsonb -> 'key')) AS made
 WHERE NOT EXISTS (SELECT FROM public.erased_keys AS erased
                    WHERE erased.topic = ANY({topics})
                      AND erased.key_hash = sha256(convert_to(state::jsonb ->> 'key', 'UTF8'))
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
Derived = tuple[StateTable, Comparison]  # a table, and the comparison that declares it


def derived(spec: SinkSpec) -> list[Derived]:
    """The tables of a sink that follow from comparisons: those of projections without a file ``NAME.rebuild.sql``.

    Raises FileNotFoundError if nothing says how to rebuild a projection, Failure if a comparison cannot be used.
    """
    declared = dict[str, Derived]()
    for one in comparison_files.load(spec):
        if one.table is not None:
            [_, first] = declared.setdefault(one.table.name, (one.table, one))
            if first is not one:
                raise unusable(one.file, f"{first.file.name} declares table {one.table.name} too", "keep one")
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
    table, comparison = one
    cursor.execute(TABLE_COLUMNS, [f'public."{table.name}"'])
    has_default = dict(cursor.fetchall())
    with query_errors(source, comparison.file):
        columns = _columns(one, rows.columns_of(source, comparison.source), has_default)
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


def _columns(one: Derived, returned: Sequence[str], has_default: Mapping[str, bool]) -> list[str]:
    """The columns to set. Raises Failure if they are not those of the table."""
    table, comparison = one
    columns = [name for name in returned if name != "key"]
    known = has_default.keys() - {"sink", table.key}
    problem = "" if columns else "it returns no column to set"
    if unknown := [name for name in columns if name not in known]:
        problem = f"table {table.name} has no column {', '.join(unknown)}"
    elif lacking := sorted(name for name in known if name not in columns and not has_default[name]):
        problem = f"it does not return {', '.join(lacking)} of table {table.name}, without a default"
    if problem:
        raise Failure(
            f"{comparison.file}: {problem}",
            "correct the query, or write a file NAME.rebuild.sql beside the projection",
            code="rebuild-unsupported",
        )
    return columns
