"""Staging and MERGE in a warehouse: each event by its id, each order by its newest version.

WAREHOUSE says which warehouse: the name of a DuckDB file, or ``snowflake`` for the connection ``warehouse`` of
~/.snowflake/connections.toml. Each MERGE may run again, so there is no transaction around the two.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import duckdb
import pyarrow as pa

COLUMNS = ["event_id", "order_id", "status", "cents", "version", "occurred_at"]
TABLES = [
    f"CREATE TABLE IF NOT EXISTS {name} (event_id VARCHAR, order_id VARCHAR, status VARCHAR, cents BIGINT, "
    "version BIGINT, occurred_at TIMESTAMPTZ)"
    for name in ("order_events", "orders")
]
MERGE_EVENTS = """
MERGE INTO order_events AS t
USING staging AS s
   ON t.event_id = s.event_id
 WHEN NOT MATCHED THEN
      INSERT (event_id, order_id, status, cents, version, occurred_at)
      VALUES (s.event_id, s.order_id, s.status, s.cents, s.version, s.occurred_at)
"""
MERGE_ORDERS = """
MERGE INTO orders AS t
USING (SELECT *
         FROM staging
      QUALIFY row_number() OVER (PARTITION BY order_id ORDER BY version DESC) = 1) AS s
   ON t.order_id = s.order_id
 WHEN MATCHED AND s.version > t.version THEN
      UPDATE SET event_id = s.event_id, status = s.status, cents = s.cents, version = s.version,
                 occurred_at = s.occurred_at
 WHEN NOT MATCHED THEN
      INSERT (event_id, order_id, status, cents, version, occurred_at)
      VALUES (s.event_id, s.order_id, s.status, s.cents, s.version, s.occurred_at)
"""


def write(events: pa.Table) -> None:
    """Merge new events, and the orders that they are about."""
    with _warehouse() as (connection, cursor):
        _stage(connection, cursor, events.select(COLUMNS))
        cursor.execute(MERGE_EVENTS)
        cursor.execute(MERGE_ORDERS)


def totals() -> list[tuple[str, int, int]]:
    """What `outbox check` compares: by order its cents and version."""
    with _warehouse() as (_, cursor):
        return cursor.execute("SELECT order_id, cents, version FROM orders").fetchall()  # type: ignore[no-any-return]


def erase(key: str, topic: str, *, dry_run: bool) -> int:
    """Delete what the warehouse has of an order; returns how many rows."""
    del topic
    with _warehouse() as (_, cursor):
        found = 0
        for table in ("order_events", "orders"):
            [(rows,)] = cursor.execute(f"SELECT count(*) FROM {table} WHERE order_id = ?", [key]).fetchall()  # noqa: S608
            found += rows
            if rows and not dry_run:
                cursor.execute(f"DELETE FROM {table} WHERE order_id = ?", [key])  # noqa: S608
    return found


@contextmanager
def _warehouse() -> Iterator[tuple[Any, Any]]:
    """Connection and cursor, opened for each batch: a DuckDB file is for one process at a time, and others read too."""
    with closing(_connection()) as connection, closing(connection.cursor()) as cursor:
        for table in TABLES:
            cursor.execute(table)
        yield connection, cursor


def _connection() -> Any:
    if os.environ["WAREHOUSE"] != "snowflake":
        return duckdb.connect(os.environ["WAREHOUSE"])
    import snowflake.connector

    return snowflake.connector.connect(
        connection_name="warehouse", database="shop", schema="public", paramstyle="qmark"
    )


def _stage(connection: Any, cursor: Any, events: pa.Table) -> None:
    """Let the table ``staging`` have the events; a session has its own."""
    if isinstance(connection, duckdb.DuckDBPyConnection):
        cursor.register("staging", events)
        return
    from snowflake.connector.pandas_tools import write_pandas

    cursor.execute("CREATE OR REPLACE TEMPORARY TABLE staging LIKE order_events")
    write_pandas(connection, events.to_pandas(), "STAGING", quote_identifiers=False, use_logical_type=True)
