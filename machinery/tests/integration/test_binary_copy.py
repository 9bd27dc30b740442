"""A binary COPY stores the same values as Postgres makes of their text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from decimal import Decimal
from typing import Any

import hypothesis
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from psycopg2 import extensions, sql

from outbox.base.database import connect
from outbox.base.settings import Settings, SinkRole
from outbox.sink.decoding import binary
from outbox.sink.decoding.values import Type, as_table, columns_of

Row = dict[Type, Any]

TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=5)
VALUES: dict[Type, st.SearchStrategy[Any]] = {
    "uuid": st.uuids().map(str) | st.uuids().map(lambda one: str(one).upper()),
    "timestamptz": st.datetimes(timezones=st.timezones()),
    "bigint": st.integers(-(2**63), 2**63 - 1),
    "integer": st.integers(-(2**31), 2**31 - 1),
    "boolean": st.booleans(),
    "text": TEXTS,
    "numeric": st.decimals(allow_nan=False, allow_infinity=False).filter(lambda one: abs(one.adjusted()) < 100).map(str)
    | st.integers(-(10**50), 10**50).map(str),
    "jsonb": st.sampled_from(["{}", "null", '"ü"', '{"a": [1.50, true]}']),
    "bytea": st.binary(max_size=5),
    "double precision": st.floats(),
    "date": st.dates(),
}
COLUMNS: dict[str, Type] = {f"{type_}_column": type_ for type_ in VALUES}


@pytest.fixture(scope="module")
def connection(shared_databases: Settings) -> Iterator[extensions.connection]:
    """With a temporary table that has a column of each type."""
    with closing(connect(shared_databases, SinkRole.WRITER)) as connection:
        columns = sql.SQL("CREATE TEMPORARY TABLE copied (number int, {})").format(binary.definitions(COLUMNS))
        with connection, connection.cursor() as cursor:
            cursor.execute(columns)
        yield connection


def copied(connection: extensions.connection, rows: Sequence[Row]) -> list[tuple[Any, ...]]:
    """The copied rows, read from Postgres as text."""
    values = [(number, *(row[type_] for type_ in VALUES)) for number, row in enumerate(rows)]
    all_types: Mapping[str, Type] = {"number": "integer", **COLUMNS}
    with connection, connection.cursor() as cursor:
        cursor.execute("TRUNCATE copied")
        binary.encode(columns_of(all_types, values), all_types).copy(cursor, sql.Identifier("copied"))
        texts = ", ".join(f'"{column}"::text' for column in COLUMNS)
        cursor.execute(f"SELECT {texts} FROM copied ORDER BY number")
        return cursor.fetchall()


def as_text(connection: extensions.connection, row: Row) -> tuple[Any, ...]:
    """The values of a row as Postgres' text."""
    with connection, connection.cursor() as cursor:
        cursor.execute(
            f"SELECT {', '.join(f'CAST(CAST(%s AS {type_}) AS text)' for type_ in VALUES)}",
            # A literal of a number has no -0.0.
            [repr(value) if isinstance(value, float) else value for value in map(row.get, VALUES)],
        )
        ((*found,),) = cursor.fetchall()
        return tuple(found)


def row(numeric: str) -> Row:
    return {**dict.fromkeys(VALUES), "numeric": numeric}


ROWS = st.fixed_dictionaries({type_: st.none() | values for type_, values in VALUES.items()})


@hypothesis.settings(deadline=None, max_examples=50)
@given(rows=st.lists(ROWS, min_size=1, max_size=5))
@example([row(text) for text in ("0", "-0.00", "1E+5", "10000", "0.0001", "1E-9", "-12345.6789", "9999.99990000")])
@example([row(text) for text in ("1E+5000", "-12.5e-9999", "0E+9999", "-0E-9999", "1e3", "-.5E1", "7.E-4")])
@example([{**row("1"), "text": text} for text in ("üa", "abc", "a\\N")])  # of one width in bytes
@example([{**row("1"), "text": text} for text in ("ü" * 60, "a" * 120)])
def test_values_arrive_as_they_would_as_text_and_alike_from_a_table_of_arrow(
    connection: extensions.connection, rows: Sequence[Row]
) -> None:
    assert copied(connection, rows) == [as_text(connection, one) for one in rows]
    columns = {name: [row[type_] for row in rows] for name, type_ in COLUMNS.items()}
    with suppress(pa.ArrowException):  # a moment of the first or last day of the calendar elsewhere
        assert binary.encode_table(as_table(columns, COLUMNS), COLUMNS) == binary.encode(columns, COLUMNS)


@hypothesis.settings(deadline=None, max_examples=50)
@given(
    scale=st.integers(0, 9),
    digits=st.lists(st.none() | st.integers(-(10**20), 10**20) | st.integers(-(10**6), 10**6), min_size=1, max_size=5),
)
@example(0, [0, None, 9_999, -10_000, 2**63 - 1, -(2**63)])
@example(3, [-1, 0, 1_000, -12_345_678])
def test_decimals_of_arrow_arrive_as_they_are(
    connection: extensions.connection, scale: int, digits: Sequence[int | None]
) -> None:
    """Those of 64 bits go another way than others."""
    numbers = [None if digit is None else Decimal(digit).scaleb(-scale) for digit in digits]
    columns = {
        "number": pa.array(range(len(numbers)), pa.int32()),
        "numeric_column": pa.array(numbers, pa.decimal128(38, scale)),
    }
    for some in (pa.table(columns), pa.table(columns).slice(1)):
        with connection, connection.cursor() as cursor:
            cursor.execute("TRUNCATE copied")
            binary.encode_table(some, {"number": "integer", **COLUMNS}).copy(cursor, sql.Identifier("copied"))
            cursor.execute("SELECT numeric_column::text FROM copied ORDER BY number")
            found = [text for (text,) in cursor]
        assert found == [None if number is None else f"{number:f}" for number in some["numeric_column"].to_pylist()]


@pytest.mark.parametrize("parts", [[[]], [[], [1], [], [2, 3]]], ids=["alone", "among others"])
def test_no_rows_end_no_copy(connection: extensions.connection, parts: list[list[int]]) -> None:
    types: Mapping[str, Type] = {"number": "integer"}
    [together] = binary.Encoded.together(binary.encode({"number": numbers}, types) for numbers in parts)
    with connection, connection.cursor() as cursor:
        cursor.execute("TRUNCATE copied")
        together.copy(cursor, sql.Identifier("copied"))
        cursor.execute("SELECT count(*) FROM copied")
        assert cursor.fetchone() == (sum(map(len, parts)),)
