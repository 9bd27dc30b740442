"""Rows of a temporary table as the stream has them: Arrow tables with the columns of a sink's layout."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
from psycopg2 import extensions, sql

from outbox.events.schema import Column
from outbox.sink.values import schema_of, table_of

BATCH = sql.Identifier("pg_temp", "outbox_batch")


def fetched(cursor: extensions.cursor, table: sql.Identifier, columns: Sequence[Column]) -> pa.Table:
    """All rows of a table: the place of each event, and these columns."""
    wanted = [
        sql.SQL("{}::text" if field.type == pa.string() else "{}").format(sql.Identifier(field.name))
        for field in schema_of(columns)
    ]
    cursor.execute(sql.SQL("SELECT {} FROM {}").format(sql.SQL(", ").join(wanted), table))
    return table_of(cursor.fetchall(), columns)
