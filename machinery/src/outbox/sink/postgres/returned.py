"""What a transform returns, as columns of Postgres."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from uuid import UUID

import pyarrow as pa

from outbox.events.schema import Column, SqlType
from outbox.events.values import NOT_JSON, NUL, decode
from outbox.sink.layout import PLACE, Layout
from outbox.sink.values import ARROW_TYPES, schema_of

SQL_TYPES: Mapping[pa.DataType, SqlType] = {
    pa.string(): "text",
    pa.int8(): "bigint",
    pa.int16(): "bigint",
    pa.int32(): "bigint",
    pa.int64(): "bigint",
    pa.float32(): "double precision",
    pa.float64(): "double precision",
    pa.bool_(): "boolean",
    pa.timestamp("us", tz="UTC"): "timestamptz",
    pa.date32(): "date",
}


def columns_of(returned: pa.Schema, events: Layout) -> Sequence[Column]:
    """The columns of Postgres, beside the place of each event. A column of the events keeps its type, if it is still
    of the same in Spark.
    """
    given = {column.name: column for column in events.columns}
    return [
        given[field.name]
        if field.name in given and ARROW_TYPES[given[field.name].type] == field.type
        else Column(field.name, SQL_TYPES.get(field.type, "numeric"), is_nullable=True)
        for field in returned
        if field.name not in PLACE
    ]


def as_columns(rows: pa.Table, columns: Sequence[Column]) -> pa.Table:
    """Rows that Spark returns as columns of these types. Raises ArrowInvalid for a value that has none."""
    schema = schema_of(columns)
    return rows.select(schema.names).cast(schema)


def require_storable(rows: pa.Table, columns: Sequence[Column]) -> None:
    """Raises ValueError for a text that a column of Postgres does not take, of few rows."""
    for column in columns:
        if column.type in CHECKS:
            for value in filter(None, rows[column.name].to_pylist()):
                try:
                    CHECKS[column.type](value)
                except ValueError as error:
                    raise ValueError(f"column {column.name}: {error}") from None


def _no_nul(text: str) -> None:
    if NUL in text:
        raise ValueError("a text contains NUL, which Postgres has no text for")


def _json(text: str) -> None:
    try:
        decode(text.encode())
    except NOT_JSON as error:
        raise ValueError(f"no JSON: {error}") from None


CHECKS: Mapping[SqlType, Callable[[str], object]] = {"text": _no_nul, "jsonb": _json, "uuid": UUID, "numeric": Decimal}
