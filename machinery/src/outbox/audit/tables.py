"""The tables of the sink database that have rows per sink: the machinery's, and those that a project has added."""

from __future__ import annotations

from collections.abc import Collection

from psycopg2 import extensions

# What the migrations of the machinery make. A project compares its own tables.
MACHINERY = frozenset(
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
TABLES = """
SELECT pg_class.oid::regclass::text
  FROM pg_class
  JOIN pg_namespace ON pg_namespace.oid = relnamespace
  JOIN pg_attribute ON attrelid = pg_class.oid
 WHERE relkind IN ('r', 'p') AND NOT relispartition AND attname = 'sink' AND NOT attisdropped
   AND nspname <> 'information_schema' AND nspname NOT LIKE 'pg\\_%'
 ORDER BY 1
"""


def of_sinks(cursor: extensions.cursor) -> list[str]:
    """Every table with a column ``sink``, by the name that a query gives it."""
    cursor.execute(TABLES)
    return [table for (table,) in cursor]


def uncompared(cursor: extensions.cursor, read: Collection[str]) -> list[str]:
    """The project's tables with rows per sink that are not among those that comparisons read."""
    return [table for table in of_sinks(cursor) if table not in MACHINERY and table not in read]
