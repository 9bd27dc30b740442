"""The tables that the queries of comparisons read, and those that none reads."""

from __future__ import annotations

import json
from collections.abc import Collection

from psycopg2 import extensions, sql

from outbox.sink.comparison_files import Comparison
from outbox.sink.rows import query_errors

# What the migrations of the machinery make. A project compares its own tables.
MACHINERY_TABLES = frozenset(
    {
        *("applied_versions", "base_versions", "checkpoint_generations", "dead_letters", "key_versions"),
        *("landed_events", "positions", "processed_changes", "processed_events", "skipped_events"),
    }
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
# By the plan of a query, the tables that it scans; of a partition its table.
TABLES = """
SELECT DISTINCT coalesce(pg_partition_root(pg_class.oid), pg_class.oid)::regclass::text
  FROM jsonb_path_query(%s, 'strict $.** ? (exists (@."Relation Name"))') AS scan
  JOIN pg_namespace ON nspname = scan ->> 'Schema'
  JOIN pg_class ON relnamespace = pg_namespace.oid AND relname = scan ->> 'Relation Name'
"""


def tables_read(connection: extensions.connection, comparison: Comparison) -> set[str]:
    """The tables that the query of the sinks' totals or rows reads, through views too."""
    with query_errors(connection, comparison.file), connection.cursor() as cursor:
        cursor.execute(sql.SQL("EXPLAIN (VERBOSE, FORMAT JSON) {}").format(sql.SQL(comparison.sink or "")))
        [(plans,)] = cursor.fetchall()
        cursor.execute(TABLES, [json.dumps(plans)])
        return {table for (table,) in cursor}


def uncompared_tables(cursor: extensions.cursor, read: Collection[str]) -> list[str]:
    """The project's tables with a column ``sink`` that are not among those that comparisons read."""
    cursor.execute(SINK_TABLES)
    return [table for (table,) in cursor if table not in MACHINERY_TABLES and table not in read]
