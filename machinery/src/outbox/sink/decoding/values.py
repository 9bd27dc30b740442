"""Rows of events by columns: the values of each column as Python has them, and as Arrow has them for Spark. And the ids
of events, which are UUIDv7s, with the time inside.

Arrow and NumPy cost a process 50 MB. So only what is for Spark, a transform or a comparison becomes Arrow.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date, timedelta
from functools import cache
from typing import Any, Literal
from uuid import UUID

from outbox.base.heavy import pa
from outbox.events.schema import Column, SqlType

Type = SqlType | Literal["integer", "bytea"]
Columns = Mapping[str, Sequence[Any]]  # by name the values of a column, each as `outbox.events.values.convert` makes it
PLACE_TYPES: Mapping[str, Type] = {"event_id": "uuid", "partition": "integer", "offset": "bigint"}
EPOCH = date(1970, 1, 1)
STEP_MS = 1 << 16
DIGITS_AS_0 = bytes.maketrans(b"123456789abcdef", b"0" * 15)
SHAPE, VERSION_PLACE, VARIANT_PLACE = b"00000000-0000-0000-0000-000000000000,", 14, 19


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


def are_v7(ids: Sequence[bytes]) -> bool:
    """Whether all are UUIDv7s in lower case. Their bytes are looked at together, which is six times as fast."""
    text = b"".join(one + b"," for one in ids)
    return (
        text.translate(DIGITS_AS_0) == SHAPE * len(ids)
        and {*text[VERSION_PLACE :: len(SHAPE)]} <= {*b"7"}
        and {*text[VARIANT_PLACE :: len(SHAPE)]} <= {*b"89ab"}
    )


def day_of(event_id: UUID) -> date:
    """The day (UTC) of the time inside a UUIDv7; the last day of the calendar for a time beyond it."""
    return _day(event_id.int >> 80)


def days(event_ids: Iterable[str]) -> set[date]:
    """The days, in UTC, of the times inside these UUIDv7s, and maybe the day before one of them."""
    # The first eight digits count in steps of 65.5 s, so that a batch has few of them, however many ids it has.
    first_ms = {int(step, 16) << 16 for step in {event_id[:8] for event_id in event_ids}}
    return {_day(ms) for start in first_ms for ms in (start, start + STEP_MS - 1)}


def made_at_ms(event_id: str) -> int:
    """The time inside a UUIDv7, in milliseconds since 1970."""
    return int(event_id[:8] + event_id[9:13], 16)


def _day(ms: int) -> date:
    return EPOCH + min(timedelta(milliseconds=ms), date.max - EPOCH)
