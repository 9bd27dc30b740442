"""A payload as a reader sees it: decoded from JSON, and each property converted to what its Postgres column takes.

`append` and the sinks ask here, so that no service commits an event that a sink would set aside.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from functools import cache
from typing import Any

import msgspec

from outbox.events import references
from outbox.events.schema import Column, PayloadSchema, Rejection, SqlType, Violation, shortened

NUL = "\0"
ESCAPED_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")  # after an escaped backslash it is text
EXPONENT_MAX = 100  # no column holds a larger number, and writing out 1e999999 takes a while
# Of a number as it is sent, and as jsonb has it, without an exponent. Postgres has room for 16,383 digits behind the
# point.
NUMBER_MAX_CHARACTERS = 1000
KEY_MAX_BYTES = 1000  # an entry of a B-tree takes some 2,700; the outbox has the CHECK columns_fit_a_record
NESTING_MAX = 200  # the validator fails beyond 255; how much Python itself takes depends on its version
DEEP_MIN_BYTES = 2 * NESTING_MAX  # each level takes two
NOT_FINITE = "NaN and infinity are no numbers in JSON"
NOT_JSON = (msgspec.DecodeError, ValueError, RecursionError)
# What msgspec, a model of pydantic, and a value that contains itself raise.
NOT_ENCODABLE = (TypeError, ValueError, OverflowError, RecursionError)
# Subclasses of these are written as what they are; msgspec itself takes only the types.
PLAIN: dict[type, Callable[[Any], Any]] = {str: str.__str__, int: int.__int__, float: float.__float__}


def parse_json(value: bytes | None) -> tuple[Any, Rejection | None]:
    """A record's value as JSON, or why it is not. Numbers with a point or an exponent are exact decimals."""
    if value is None:
        return None, Rejection("no value", "the value is null: a tombstone is no event")
    try:
        decoded = decode(value)
    except NOT_JSON as error:
        return None, Rejection("not JSON" if _is_utf8(value) else "not UTF-8", shortened(str(error)))
    if may_be_deep(value) and is_deep(decoded):
        return None, Rejection("not JSON", f"nested deeper than {NESTING_MAX} levels")
    return decoded, None


def convert(type_: SqlType, value: Any) -> Any:
    """A valid value of a property, as its column takes it. Raises ValueError if Postgres has nothing like it."""
    converter = CONVERTERS.get(type_)
    return value if value is None or converter is None else converter(value)


def convert_all(type_: SqlType, values: Sequence[Any]) -> Sequence[Any]:
    """Valid values of one property, as `convert` does one by one, and faster."""
    converter = CONVERTERS.get(type_)
    if converter is None:
        return values
    return [convert(type_, value) for value in values] if None in values else [*map(converter, values)]


def misfit(schema: PayloadSchema, payload: Mapping[str, Any]) -> Violation | None:
    """The first property of a valid payload for whose value Postgres has no place; None if each has one."""
    for column in _converted(schema):
        try:
            convert(column.type, payload.get(column.name))
        except ValueError as error:
            return Violation(column.name, str(error))
    return None


@cache
def _converted(schema: PayloadSchema) -> list[Column]:
    """The columns in which Postgres may have no place for a valid value."""
    return [column for column in schema.columns if column.type in ("timestamptz", "text", "jsonb")]


def encode(value: object) -> bytes:
    """A value that a program made, as JSON. A Decimal is a number with all its digits; a UUID and a datetime are texts.

    Raises one of NOT_ENCODABLE for what JSON cannot express. NaN and infinity are such values: msgspec and pydantic
    would write null for them.
    """
    encoded = _encode(value)
    if b"null" in encoded and not _is_finite(msgspec.to_builtins(value, enc_hook=_as_finite_builtin)):
        raise ValueError(NOT_FINITE)
    return encoded


def as_json(value: object) -> Any:
    """A value that a program made, as a reader of its JSON has it. Raises one of NOT_ENCODABLE if it has no JSON."""
    return decode(encode(value))


def may_be_deep(value: bytes) -> bool:
    """Whether JSON has enough brackets to be nested too deep."""
    return len(value) > DEEP_MIN_BYTES and value.count(b"[") + value.count(b"{") > NESTING_MAX


def is_deep(decoded: Any) -> bool:
    """Whether decoded JSON is nested too deep."""
    return references.is_deep(decoded, NESTING_MAX)


def _is_utf8(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def _is_long(text: str, number: Decimal) -> bool:
    length = len(text)
    if NUMBER_MAX_CHARACTERS - 2 * EXPONENT_MAX < length <= NUMBER_MAX_CHARACTERS:  # an exponent may write out to more
        length = len(f"{number:f}")
    return length > NUMBER_MAX_CHARACTERS


def _number(text: str) -> Decimal:
    try:
        number = Decimal(text)
    except InvalidOperation:  # its exponent has too many digits
        number = None
    if number is None or abs(number.adjusted()) > EXPONENT_MAX or _is_long(text, number):
        raise ValueError("a number is out of range")  # and which one may be personal
    return number


decode = msgspec.json.Decoder(float_hook=_number).decode


def _as_builtin(value: Any) -> Any:
    """A value of a type that msgspec does not know, as one of a type that it knows."""
    dump = getattr(value, "model_dump", None)
    if dump is not None:  # a model of pydantic, which need not be installed
        return dump(mode="json", warnings=False)  # a warning would print the value
    if isinstance(value, Mapping):
        return dict(value)
    for type_, as_plain in PLAIN.items():
        if isinstance(value, type_):
            return as_plain(value)
    raise TypeError(f"{type(value).__name__} is no type that JSON has a value for")


_encode = msgspec.json.Encoder(decimal_format="number", enc_hook=_as_builtin).encode


def _as_finite_builtin(value: Any) -> Any:
    if hasattr(value, "model_dump") and not _is_finite(value.model_dump(warnings=False)):
        raise ValueError(NOT_FINITE)  # pydantic itself makes null of it where a model's types do not say `float`
    return _as_builtin(value)


def _is_finite(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def _moment(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text).astimezone(UTC)  # in the first and last year, that may be no date
    except (ValueError, OverflowError):
        raise ValueError("it is no date and time that Postgres knows") from None


def _string(text: str) -> str:
    if NUL in text:
        raise ValueError("a text contains NUL, which Postgres has no text for")
    return text


def nested(value: Any) -> str:
    """An object or array as JSON text. Numbers keep all their digits."""
    text = encode(value).decode()
    if ESCAPED_NUL.search(text):
        raise ValueError("a nested text contains NUL, which Postgres has no text for")
    return text


CONVERTERS: dict[SqlType, Callable[[Any], Any]] = {
    "timestamptz": _moment,
    "bigint": int,  # valid, so without a fraction; 5.0 is an integer to JSON Schema
    "numeric": str,
    "text": _string,
    "jsonb": nested,
}
