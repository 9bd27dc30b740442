"""Columns as the input of a binary COPY, which costs Postgres a third of what CSV does.

Values of one width, with the lengths before them, are packed by one call in C for each row; what varies from row to row
is joined in between. Texts are of one width too, if all of a chunk have as many bytes: codes, say, or UUIDs as text.
The format: https://www.postgresql.org/docs/18/sql-copy.html, "Binary Format". That of a type: its `recv` function.
"""

from __future__ import annotations

import binascii
import struct
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from functools import cache
from itertools import chain, repeat
from typing import Any, NamedTuple

from outbox.base.heavy import extensions, pa, pc, sql
from outbox.sink.decoding.values import Columns, Type

HEADER, TRAILER = b"PGCOPY\n\xff\r\n\0" + bytes(8), b"\xff\xff"
NULL = -1  # as a field's length
EPOCH, MICROSECOND = datetime(2000, 1, 1, tzinfo=UTC), timedelta(microseconds=1)
EPOCH_DAY = date(2000, 1, 1).toordinal()
# By the type of a column that is a number in Arrow, since 1970, and in Postgres, since 2000: the type of that number
# there and here, and what lies between.
NUMBERS: Mapping[Type, tuple[Type, str, int]] = {
    "timestamptz": ("bigint", "int64", (EPOCH - datetime(1970, 1, 1, tzinfo=UTC)) // MICROSECOND),
    "date": ("integer", "int32", EPOCH_DAY - date(1970, 1, 1).toordinal()),
}
UUID, UUID_CHARACTERS, HYPHENS = "16s", 36, (8, 13, 18, 23)
JSONB_VERSION = b"\1"
DIGIT, BASE = 4, 10_000  # decimal places in a digit of numeric
NEGATIVE = 0x4000
EXPONENT = frozenset("eE")

# How `struct` packs the values of a column, and the values as it takes them. Without a format they are bytes, and vary
# in length.
Packed = tuple[str, Sequence[Any]]


class Encoded(NamedTuple):
    """Rows for one COPY, in pieces. Each row has the columns in this order."""

    columns: tuple[str, ...]
    pieces: Sequence[bytes]

    @classmethod
    def together(cls, parts: Iterable[Encoded]) -> Sequence[Encoded]:
        """The rows of these in as few COPYs as possible."""
        found = defaultdict[tuple[str, ...], list[bytes]](list)
        for columns, pieces in parts:
            found[columns] += pieces
        return [cls(*entry) for entry in found.items()]

    @property
    def size_bytes(self) -> int:
        """How much memory the rows take."""
        return sum(map(len, self.pieces))

    def copy(self, cursor: extensions.cursor, into: sql.Composable) -> None:
        """COPY the rows into a table, in the caller's transaction."""
        names = sql.SQL(", ").join(map(sql.Identifier, self.columns))
        statement = sql.SQL("COPY {} ({}) FROM STDIN WITH (FORMAT binary)").format(into, names)
        pieces: Any = _Pieces(iter([HEADER, *self.pieces, TRAILER]))
        cursor.copy_expert(statement, pieces)


class _Pieces:
    """As much of a file as `copy_expert` uses. It takes what it gets, however much it asks for."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces

    def read(self, _size: int = -1) -> bytes:
        return next(filter(None, self._pieces), b"")  # an empty one would be the end


def definitions(types: Mapping[str, Type]) -> sql.Composable:
    """The columns of a table that checks nothing."""
    columns = (sql.SQL("{} {}").format(sql.Identifier(name), sql.SQL(type_)) for name, type_ in types.items())
    return sql.SQL(", ").join(columns)


def encode(rows: Columns, types: Mapping[str, Type]) -> Encoded:
    """Rows for a binary COPY. ``types`` are those of the columns in Postgres, by name.

    Raises ValueError if a value is not of its column's type.
    """
    try:
        return Encoded((*rows,), [b"".join(chain.from_iterable(_pieces(rows, types)))])
    except struct.error as error:
        raise ValueError(str(error)) from None


def encode_table(table: pa.Table, types: Mapping[str, Type]) -> Encoded:
    """Rows of Arrow's for a binary COPY. Moments and days are numbers there and in Postgres, and stay numbers."""
    rows, packed_as = dict[str, Sequence[Any]](), dict(types)
    for name in table.column_names:
        column = table[name]
        if types[name] in NUMBERS:
            packed_as[name], arrow_type, epoch = NUMBERS[types[name]]
            column = pc.subtract(column.cast(arrow_type), epoch)
        rows[name] = column.to_pylist()
    return encode(rows, packed_as)


def _pieces(rows: Columns, types: Mapping[str, Type]) -> Iterable[Iterable[bytes]]:
    """By row the pieces that are its bytes, one behind the other."""
    pieces: list[Iterable[bytes]] = []
    form, values = ">h", list[Iterable[Any]]([repeat(len(rows))])
    for name, column in rows.items():
        of_column, contents = _packed(types[name], column)
        if of_column:
            form += f"i{of_column}"
            values += [repeat(struct.calcsize(f">{of_column}")), contents]
        else:  # a piece ends with the length of what follows it
            lengths = (NULL if content is None else len(content) for content in contents)
            pieces += [map(struct.Struct(f"{form}i").pack, *values, lengths), (content or b"" for content in contents)]
            form, values = ">", []
    if values:
        pieces.append(map(struct.Struct(form).pack, *values))
    return zip(*pieces, strict=True)


def _packed(type_: Type, column: Sequence[Any]) -> Packed:
    """The values of a column as Postgres takes them; None for NULL."""
    if None not in column:
        form, values = PACKED[type_](column)
        widths = {*map(len, values)} if not form else ()
        return (f"{widths.pop()}s", values) if len(widths) == 1 else (form, values)
    form, values = PACKED[type_]([value for value in column if value is not None])
    contents = map(struct.Struct(f">{form}").pack, values) if form else iter(values)
    return "", [None if value is None else next(contents) for value in column]


def _uuids(texts: Sequence[str]) -> Packed:
    text = "".join(texts).encode()
    if {*map(len, texts)} - {UUID_CHARACTERS} or any(
        text[place::UUID_CHARACTERS] != b"-" * len(texts) for place in HYPHENS
    ):
        raise ValueError("a value is no UUID")
    digits = binascii.unhexlify(text.translate(None, b"-"))
    return UUID, struct.Struct(UUID * len(texts)).unpack(digits)  # its format is not kept, unlike that of a function


def _numeric(text: str) -> bytes:
    """How many digits of base BASE, weight of the first, sign, decimal places, digits (`numeric_recv`, numeric.c)."""
    mantissa, exponent = text, 0
    if not EXPONENT.isdisjoint(text):  # written out, it may have more digits than Python reads
        mantissa, _, power = text.upper().partition("E")
        exponent = int(power)
    whole, _, fraction = mantissa.partition(".")
    places = len(fraction) - exponent
    scale = places if places > 0 else 0
    behind_point = -(-scale // DIGIT)
    number = abs(int(whole + fraction)) * 10 ** (behind_point * DIGIT - places)
    digits: list[int] = []
    while number:
        digits.append(number % BASE)
        number //= BASE
    count = len(digits)
    digits.reverse()
    try:
        sign = NEGATIVE if text[0] == "-" else 0
        return _numeric_form(count).pack(count, count - 1 - behind_point, sign, scale, *digits)
    except struct.error:
        raise ValueError("a number has more digits than Postgres has room for") from None


@cache
def _numeric_form(count: int) -> struct.Struct:
    return struct.Struct(f">HhHH{count}H")


def _as(form: str) -> Callable[[Sequence[Any]], Packed]:
    return lambda values: (form, values)


def _each(function: Callable[[Any], Any], form: str = "") -> Callable[[Sequence[Any]], Packed]:
    return lambda values: (form, list(map(function, values)))


PACKED: Mapping[Type, Callable[[Sequence[Any]], Packed]] = {
    "uuid": _uuids,
    "timestamptz": lambda moments: ("q", [(moment - EPOCH) // MICROSECOND for moment in moments]),
    "bigint": _as("q"),
    "integer": _as("i"),
    "boolean": _as("?"),
    "double precision": _as("d"),
    "date": _each(lambda day: day.toordinal() - EPOCH_DAY, "i"),
    "numeric": _each(_numeric),
    "text": _each(str.encode),
    "bytea": _as(""),
    "jsonb": _each(lambda text: JSONB_VERSION + text.encode()),
}
