"""The totals that the queries of a comparison return, the tables that they read, and those that none reads."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from psycopg2 import extensions, sql

from outbox.audit.comparison_files import Comparison
from outbox.audit.quantity import EXACT
from outbox.sink.rows import columns_of, query_errors, unusable

FETCH_ROWS = 10_000
TOTALS = "SELECT {sink}, key, total, {version} FROM (\n{query}\n) AS compared"
# What the migrations of the machinery make. A project compares its own tables.
MACHINERY_TABLES = frozenset(
    (
        "applied_versions",
        "base_versions",
        "checkpoint_generations",
        "dead_letters",
        "key_versions",
        "landed_events",
        "positions",
        "processed_changes",
        "processed_events",
        "skipped_events",
    )
)
SINK_TABLES = """
SELECT pg_class.oid::regclass::text
  FROM pg_class
  JOIN pg_namespace ON pg_namespace.oid = relnamespace
  JOIN pg_attribute ON attrelid = pg_class.oid
 WHERE relkind IN ('r', 'p') AND NOT relispartition AND attname = 'sink' AND NOT attisdropped
   AND nspname <> 'information_schema' AND nspname NOT LIKE 'pg\\_%'
 ORDER BY 1
"""
# By the name of a partition that of its table.
TABLES = """
SELECT DISTINCT coalesce(pg_partition_root(pg_class.oid), pg_class.oid)::regclass::text
  FROM unnest(%s::text[], %s::text[]) AS read (schema, name)
  JOIN pg_namespace ON nspname = read.schema
  JOIN pg_class ON relnamespace = pg_namespace.oid AND relname = read.name
"""


@dataclass
class Totals:
    """By key the total, and the version if the query has one."""

    totals: dict[str, Decimal] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)
    has_version: bool = False

    def add(self, key: str, total: Any, version: int | None) -> None:
        """Add a row; several of one key are added up."""
        if total is not None:
            self.totals[key] = EXACT.add(self.totals.get(key, Decimal(0)), Decimal(total))
        if version is not None:
            self.versions[key] = max(int(version), self.versions.get(key, int(version)))


def read_totals(
    connection: extensions.connection, comparison: Comparison, query: str, *, by_sink: bool = False
) -> dict[str, Totals]:
    """The totals that a query of a comparison returns: by sink, or all under the name ``""``.

    Raises Failure if the query cannot be run, or lacks a column.
    """
    with query_errors(connection, comparison.file):
        known = set(columns_of(connection, query))
        required = {"key", "total", *(["sink"] if by_sink else [])}
        if not known >= required:
            raise unusable(
                comparison.file,
                f"{'[sink]' if by_sink else '[source]'} has no column {', '.join(sorted(required - known))}",
                f"let it return {', '.join(sorted(required))}",
            )
        has_version = "version" in known
        found = {} if by_sink else {"": Totals(has_version=has_version)}
        statement = sql.SQL(TOTALS).format(
            sink=sql.SQL("sink" if by_sink else "''"),
            version=sql.SQL("version" if has_version else "NULL"),
            query=sql.SQL(query),
        )
        with connection.cursor(name="totals") as cursor:
            cursor.itersize = FETCH_ROWS
            cursor.execute(statement)
            for sink, key, total, version in cursor:
                if key is not None:
                    found.setdefault(sink, Totals(has_version=has_version)).add(str(key), total, version)
    return found


def tables_read(connection: extensions.connection, comparison: Comparison) -> set[str]:
    """The tables that the query of a sink's totals reads, through views too."""
    with query_errors(connection, comparison.file), connection.cursor() as cursor:
        cursor.execute(sql.SQL("EXPLAIN (VERBOSE, FORMAT JSON) {}").format(sql.SQL(comparison.sink or "")))
        [(plans,)] = cursor.fetchall()
        read = list(_relations(plans))
        cursor.execute(TABLES, [[schema for schema, _ in read], [name for _, name in read]])
        return {table for (table,) in cursor}


def sink_tables(cursor: extensions.cursor) -> list[str]:
    """Every table with a column ``sink``, by the name that a query gives it."""
    cursor.execute(SINK_TABLES)
    return [table for (table,) in cursor]


def uncompared_tables(cursor: extensions.cursor, read: Collection[str]) -> list[str]:
    """The project's tables with rows per sink that are not among those that comparisons read."""
    return [table for table in sink_tables(cursor) if table not in MACHINERY_TABLES and table not in read]


def _relations(plan: Any) -> Iterator[tuple[str, str]]:
    """Schema and name of what a plan scans, at any depth."""
    if isinstance(plan, Mapping):
        if "Relation Name" in plan:
            yield plan["Schema"], plan["Relation Name"]
        plan = list(plan.values())
    if isinstance(plan, list):
        for part in plan:
            yield from _relations(part)
