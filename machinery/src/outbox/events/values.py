"""A payload as a reader sees it: decoded from JSON, and each property converted to what its Postgres column takes.

`append` and the sinks ask here, so that no service commits an event that a sink would set aside.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from typing import Any

import msgspec

from outbox.events import references
from outbox.events.schema import Rejection, SqlType, shortened

NUL = "\0"
ESCAPED_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")  # after an escaped backslash it is text
EXPONENT_MAX = 100  # no column holds a larger number, and writing out 1e999999 takes a while
NUMBER_MAX_CHARACTERS = 1000  # Postgres has room for 16,383 digits behind the point
KEY_MAX_BYTES = 1000  # an entry of a B-tree takes some 2,700; the outbox has the CHECK columns_fit_a_record
NESTING_MAX = 200  # the validator fails beyond 255; how much Python itself takes depends on its version
NOT_JSON = (msgspec.DecodeError, ValueError, RecursionError)
_NESTED = msgspec.json.Encoder(decimal_format="number")


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


def as_json(value: Any) -> Any:
    """A value that a program made, as a reader of its JSON has it. Raises TypeError or ValueError if it has no JSON."""
    return decode(_NESTED.encode(value))


def may_be_deep(value: bytes) -> bool:
    """Whether JSON has enough brackets to be nested too deep; each level takes two bytes."""
    return len(value) > 2 * NESTING_MAX and value.count(b"[") + value.count(b"{") > NESTING_MAX


def is_deep(decoded: Any) -> bool:
    """Whether decoded JSON is nested too deep."""
    return references.is_deep(decoded, NESTING_MAX)


def _is_utf8(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def _number(text: str) -> Decimal:
    try:
        number = Decimal(text)
    except InvalidOperation:  # its exponent has too many digits
        number = None
    if number is None or abs(number.adjusted()) > EXPONENT_MAX or len(text) > NUMBER_MAX_CHARACTERS:
        raise ValueError(f"the number {shortened(text)} is out of range")
    return number


decode = msgspec.json.Decoder(float_hook=_number).decode


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


def nested(value: Any) -> str:
    """An object or array as JSON text. Numbers keep all their digits."""
    text = _NESTED.encode(value).decode()
    if ESCAPED_NUL.search(text):
        raise ValueError("a nested text contains NUL, which Postgres has no text for")
    return text


CONVERTERS: dict[SqlType, Callable[[Any], Any]] = {
    "timestamptz": _moment,
    "bigint": _whole,
    "numeric": str,
    "text": _string,
    "jsonb": nested,
}
