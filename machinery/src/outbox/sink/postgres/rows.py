"""Rows of a temporary table as the stream has them: Arrow tables with the columns of a sink's layout."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
from psycopg2 import extensions, sql

from outbox.events.schema import Column
from outbox.sink.values import ARROW_TYPES


def fetched(cursor: extensions.cursor, table: str, columns: Sequence[Column]) -> pa.Table:
    """All rows of a table: the place of each event, and these columns."""
    types = {"event_id": pa.string(), "partition": pa.int32(), "offset": pa.int64()}
    types |= {column.name: ARROW_TYPES[column.type] for column in columns}
    wanted = [
        sql.SQL("{}::text" if type_ == pa.string() else "{}").format(sql.Identifier(name))
        for name, type_ in types.items()
    ]
    cursor.execute(sql.SQL("SELECT {} FROM {}").format(sql.SQL(", ").join(wanted), sql.Identifier(table)))
    found = cursor.fetchall()
    values = zip(*found, strict=True) if found else ([] for _ in types)
    return pa.table(
        {name: pa.array(of_column, type_) for (name, type_), of_column in zip(types.items(), values, strict=True)}
    )
