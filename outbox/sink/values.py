"""The values of an event's properties as Postgres takes them: one by one, or all values of a property at once.

Both ways give the same. All at once is several times faster, and takes only what needs no second look: for anything
else, good or bad, it raises ValueError, and the caller converts one by one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from outbox.writing.contract import SqlType

NUL = "\0"
ESCAPED_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")  # behind a backslash that is escaped itself, it is text
ARROW_TYPES = {
    "uuid": pa.string(),
    "timestamptz": pa.timestamp("us", tz="UTC"),
    "bigint": pa.int64(),
    "numeric": pa.string(),  # as text: no Arrow type holds every number that Postgres does
    "boolean": pa.bool_(),
    "text": pa.string(),
    "jsonb": pa.string(),
}
_NESTED = msgspec.json.Encoder(decimal_format="number")


def convert(type_: SqlType, value: Any) -> Any:
    """A valid value of a property, as its column takes it. Raises ValueError if Postgres has nothing like it."""
    converter = CONVERTERS.get(type_)
    return value if value is None or converter is None else converter(value)


def convert_all(type_: SqlType, values: Sequence[Any]) -> pa.Array:
    """Valid values of one property. Raises ValueError if one of them needs to be looked at."""
    try:
        return COLUMNS.get(type_, _plain)(type_, values)
    except (TypeError, OverflowError) as error:
        raise ValueError(str(error)) from None


def _whole(number: int | Decimal) -> int:
    return int(number)  # valid, so without a fraction; 5.0 is an integer to JSON Schema


def _moment(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text).astimezone(UTC)  # in the first and last year, that may be no date
    except (ValueError, OverflowError):
        raise ValueError(f"{text!r} is no date and time that Postgres knows") from None


def _string(text: str) -> str:
    if NUL in text:
        raise ValueError("a text contains NUL, which Postgres has no text for")
    return text


def _nested(value: Any) -> str:
    text = _NESTED.encode(value).decode()
    if ESCAPED_NUL.search(text):
        raise ValueError("a nested text contains NUL, which Postgres has no text for")
    return text


CONVERTERS: dict[SqlType, Callable[[Any], Any]] = {
    "timestamptz": _moment,
    "bigint": _whole,
    "numeric": str,
    "text": _string,
    "jsonb": _nested,
}


def _plain(type_: SqlType, values: Sequence[Any]) -> pa.Array:
    return pa.array(values, ARROW_TYPES[type_])


def _converted(type_: SqlType, values: Sequence[Any]) -> pa.Array:
    return _plain(type_, [convert(type_, value) for value in values])


def _moments(type_: SqlType, values: Sequence[Any]) -> pa.Array:
    moments = pa.array(values, pa.string()).cast(ARROW_TYPES[type_])
    # Raises if one of them is beyond Python's calendar. To name their zone, the host would need a database of zones.
    pc.min_max(moments.cast(pa.timestamp("us"))).as_py()
    return moments


def _strings(type_: SqlType, values: Sequence[Any]) -> pa.Array:
    strings = _plain(type_, values)
    if pc.any(pc.match_substring(strings, NUL)).as_py():
        raise ValueError("a text contains NUL")
    return strings


COLUMNS: dict[SqlType, Callable[[SqlType, Sequence[Any]], pa.Array]] = {
    "timestamptz": _moments,
    "numeric": _converted,
    "text": _strings,
    "jsonb": _converted,
}
