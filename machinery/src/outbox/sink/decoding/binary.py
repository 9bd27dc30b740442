"""Arrow columns as the input of a binary COPY, which costs Postgres a third of what CSV does.

Built by columns: values of one width are copied by NumPy, and what varies from row to row is joined in between. Texts
are of one width too, if all of a chunk have as many bytes: codes, say, or UUIDs as text.
The format: https://www.postgresql.org/docs/18/sql-copy.html, "Binary Format". That of a type: its `recv` function.
"""

from __future__ import annotations

import binascii
import struct
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from itertools import chain
from typing import Any, NamedTuple

from outbox.base.heavy import extensions, np, pa, pc, sql
from outbox.sink.decoding.values import Type

HEADER, TRAILER = b"PGCOPY\n\xff\r\n\0" + bytes(8), b"\xff\xff"
NULL = -1  # as a field's length
FROM_1970_TO_2000_US = round(
    (datetime(2000, 1, 1, tzinfo=UTC) - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds() * 1e6
)
FROM_1970_TO_2000_DAYS = FROM_1970_TO_2000_US // (24 * 60 * 60 * 10**6)
HYPHENS = (8, 13, 18, 23)
UUID_CHARACTERS = 36
TEXT_MAX_WIDTH = 100  # bytes: a longer one costs more memory than it saves time
JSONB_VERSION = b"\1"
DIGIT = 4  # decimal places in a digit of numeric
NEGATIVE = 0x4000
NUMERIC_DIGITS, NUMERIC_MAX = 5, 10**18
NUMERIC = [("count", ">u2"), ("weight", ">i2"), ("sign", ">u2"), ("scale", ">u2"), ("digits", ">u2", NUMERIC_DIGITS)]


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


def encode(rows: pa.Table, types: Mapping[str, Type]) -> Encoded:
    """Rows for a binary COPY. ``types`` are those of the columns in Postgres, by name.

    Raises ValueError if a value is not of its column's type.
    """
    pieces: list[list[bytes]] = []
    piece: list[np.ndarray[Any, Any]] = [np.full(rows.num_rows, rows.num_columns, ">i2")]
    for name in rows.column_names:
        column = rows[name].combine_chunks()
        array = _of_one_width(types[name], column)
        if array is not None:
            piece += [np.full(rows.num_rows, array.dtype.itemsize, ">i4"), array]
            continue
        contents = _varying(types[name], column)
        lengths = (NULL if content is None else len(content) for content in contents)
        piece.append(np.fromiter(lengths, ">i4", rows.num_rows))  # a piece ends with the length of what follows it
        pieces += [_side_by_side(piece).tolist(), [content or b"" for content in contents]]
        piece = []
    if not pieces:
        return Encoded((*rows.column_names,), [_side_by_side(piece).tobytes()])
    if piece:
        pieces.append(_side_by_side(piece).tolist())
    return Encoded((*rows.column_names,), [b"".join(chain.from_iterable(zip(*pieces, strict=True)))])


def _side_by_side(arrays: Sequence[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """By row the bytes of each array, one behind the other."""
    rows = np.empty(len(arrays[0]), [(str(number), array.dtype) for number, array in enumerate(arrays)])
    for number, array in enumerate(arrays):
        rows[str(number)] = array
    return rows.view(f"V{rows.dtype.itemsize}")


def _of_one_width(type_: Type, column: pa.Array) -> np.ndarray[Any, Any] | None:
    """The values as Postgres takes them, if none of them is NULL and all can have the same width."""
    return FIXED[type_](column) if type_ in FIXED and not column.null_count else None


def _varying(type_: Type, column: pa.Array) -> list[bytes | None]:
    """The values as Postgres takes them; None for NULL."""
    array = _of_one_width(type_, column.drop_null())
    if array is not None:
        values = iter(array.view(f"V{array.itemsize}").tolist())
        return [next(values) if is_valid else None for is_valid in column.is_valid().to_pylist()]
    if type_ in ("text", "bytea"):
        contents: list[bytes | None] = column.cast(pa.binary()).to_pylist()
        return contents
    return [None if value is None else VARYING[type_](value) for value in column.to_pylist()]


def _numbers(form: str) -> Callable[[pa.Array], np.ndarray[Any, Any]]:
    return lambda column: column.to_numpy(zero_copy_only=False).astype(form)


def _moments(column: pa.Array) -> np.ndarray[Any, Any]:
    since_1970: np.ndarray[Any, Any] = column.cast(pa.int64()).to_numpy()
    return (since_1970 - FROM_1970_TO_2000_US).astype(">i8")


def _days(column: pa.Array) -> np.ndarray[Any, Any]:
    since_1970: np.ndarray[Any, Any] = column.cast(pa.int32()).to_numpy()
    return (since_1970 - FROM_1970_TO_2000_DAYS).astype(">i4")


def _uuids(column: pa.Array) -> np.ndarray[Any, Any]:
    column = column.cast(pa.string())
    if len(column) and _width(column) != UUID_CHARACTERS:
        raise ValueError("a value is no UUID")
    rows = _characters(column, UUID_CHARACTERS).reshape(len(column), UUID_CHARACTERS)
    if (rows[:, HYPHENS] != ord("-")).any():
        raise ValueError("a value is no UUID")
    digits = np.delete(rows, HYPHENS, axis=1).tobytes()
    return np.frombuffer(binascii.unhexlify(digits), "V16")


def _texts(column: pa.Array) -> np.ndarray[Any, Any] | None:
    """None if they are not of one width, or too wide."""
    column = column.cast(pa.string())  # whatever strings it has: `_characters` knows these
    width = _width(column)
    return np.frombuffer(_characters(column, width), f"V{width}") if 0 < width <= TEXT_MAX_WIDTH else None


def _width(column: pa.Array) -> int:
    """How many bytes each of the texts has; 0 if they differ, or without any."""
    lengths = pc.min_max(pc.binary_length(column)).as_py()
    return int(lengths["min"] or 0) if lengths["min"] == lengths["max"] else 0


def _characters(column: pa.Array, width: int) -> np.ndarray[Any, Any]:
    """The bytes of texts of this width, one behind the other."""
    if not len(column):
        return np.empty(0, np.uint8)
    _, offsets, content = column.buffers()
    first = int(np.frombuffer(offsets, np.int32)[column.offset])
    return np.frombuffer(content, np.uint8, len(column) * width, first)


def _numerics(column: pa.Array) -> np.ndarray[Any, Any] | None:
    """Numbers of at most 18 decimal digits, each as NUMERIC_DIGITS digits of base 10,000: Postgres drops zeros in front
    (`make_result`, numeric.c). None if one is longer, or has an exponent.
    """
    point = pc.find_substring(column, ".").to_numpy()
    scale = np.where(point < 0, 0, pc.binary_length(column).to_numpy() - point - 1)
    behind_point = -(-scale // DIGIT)
    shift = 10 ** (behind_point * DIGIT - scale).astype(np.int64)
    try:
        unscaled: np.ndarray[Any, Any] = pc.replace_substring(column, ".", "").cast(pa.int64()).to_numpy()
    except pa.ArrowInvalid:
        return None
    if (np.abs(unscaled) >= NUMERIC_MAX // shift).any() or (unscaled == np.iinfo(np.int64).min).any():
        return None
    encoded, rest = np.empty(len(column), NUMERIC), np.abs(unscaled) * shift
    for place in reversed(range(NUMERIC_DIGITS)):
        rest, encoded["digits"][:, place] = np.divmod(rest, 10**DIGIT)
    encoded["count"], encoded["weight"] = NUMERIC_DIGITS, NUMERIC_DIGITS - 1 - behind_point
    encoded["sign"], encoded["scale"] = np.where(unscaled < 0, NEGATIVE, 0), scale
    return encoded.view(f"V{encoded.itemsize}")


def _numeric(text: str) -> bytes:
    """How many digits of base 10,000, weight of the first, sign, decimal places, digits (`numeric_recv`, numeric.c)."""
    sign, decimals, exponent = Decimal(text).as_tuple()
    if not isinstance(exponent, int):
        raise ValueError(f"{text} is no finite number")
    scale = max(0, -exponent)
    behind_point = -(-scale // DIGIT)
    number = int("".join(map(str, decimals))) * 10 ** (exponent + behind_point * DIGIT)
    digits: list[int] = []
    while number:
        number, digit = divmod(number, 10**DIGIT)
        digits.insert(0, digit)
    weight = len(digits) - 1 - behind_point
    try:
        return struct.pack(f">HhHH{len(digits)}H", len(digits), weight, NEGATIVE * sign, scale, *digits)
    except struct.error:
        raise ValueError("a number has more digits than Postgres has room for") from None


FIXED: Mapping[Type, Callable[[pa.Array], np.ndarray[Any, Any] | None]] = {
    "uuid": _uuids,
    "timestamptz": _moments,
    "bigint": _numbers(">i8"),
    "integer": _numbers(">i4"),
    "boolean": _numbers("u1"),
    "double precision": _numbers(">f8"),
    "date": _days,
    "numeric": _numerics,
    "text": _texts,
}
VARYING: Mapping[Type, Callable[[Any], bytes]] = {
    "numeric": _numeric,
    "jsonb": lambda text: JSONB_VERSION + text.encode(),
}
