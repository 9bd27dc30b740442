"""Rows of events by columns: the values of each column as Python has them, and as Arrow has them for Spark.

Arrow and NumPy cost a process 50 MB. So only what is for Spark, a transform or a comparison becomes Arrow.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Literal

from outbox.base.heavy import pa
from outbox.events.schema import Column, SqlType

Type = SqlType | Literal["integer", "bytea"]
Columns = Mapping[str, Sequence[Any]]  # by name the values of a column, each as `outbox.events.values.convert` makes it
PLACE_TYPES: Mapping[str, Type] = {"event_id": "uuid", "partition": "integer", "offset": "bigint"}


@cache
def arrow_types() -> Mapping[Type, pa.DataType]:
    """The type of a column in Arrow, by its type in SQL. A function, because Arrow takes long to import."""
    return {
        "uuid": pa.string(),
        "timestamptz": pa.timestamp("us", tz="UTC"),
        "bigint": pa.int64(),
        "integer": pa.int32(),
        "numeric": pa.string(),  # as text: no Arrow type holds every number that Postgres does
        "boolean": pa.bool_(),
        "text": pa.string(),
        "bytea": pa.binary(),
        "jsonb": pa.string(),
        "double precision": pa.float64(),
        "date": pa.date32(),
    }


def types_of(columns: Iterable[Column]) -> Mapping[str, Type]:
    """The types of the place of an event, and of these columns."""
    return {**PLACE_TYPES, **{column.name: column.type for column in columns}}


def schema_of(types: Mapping[str, Type]) -> pa.Schema:
    """Columns of these types as Arrow has them."""
    return pa.schema({name: arrow_types()[type_] for name, type_ in types.items()})


def columns_of(names: Iterable[str], rows: Sequence[Sequence[Any]]) -> Columns:
    """Rows, of which there are some, as columns of these names."""
    return dict(zip(names, zip(*rows, strict=True), strict=True))


def rows_of(columns: Columns) -> Iterator[dict[str, Any]]:
    """Columns as rows: by row the value of each column."""
    return (dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True))


def as_table(columns: Columns, types: Mapping[str, Type]) -> pa.Table:
    """Columns as Arrow has them. ``types`` are at least theirs."""
    schema = schema_of({name: types[name] for name in columns})
    arrays = [pa.array(values, type_) for values, type_ in zip(columns.values(), schema.types, strict=True)]
    return pa.table(arrays, schema)
