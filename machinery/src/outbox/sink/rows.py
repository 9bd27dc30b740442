"""Totals and rows that queries return, as a comparison has them (`outbox.sink.comparison_files`), and how rows differ.

Two values are equal if ``to_jsonb`` makes equal JSON of both, in sessions with the settings of `outbox.base.database`.
docs/projections.md says what that means for each type. ``version`` says how far each side is, and is not compared.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import psycopg2
from psycopg2 import extensions, sql

from outbox.base.database import reason_of
from outbox.base.errors import Failure
from outbox.events.schema import HIDDEN

KEPT = 20  # differences, the worst
VALUE_MAX_CHARACTERS = 200  # shown of a value
FETCH_ROWS = 10_000
NOT_COMPARED = frozenset({"sink", "key", "version"})
# Columns of a query are looked up before it is run: it may take minutes.
COLUMNS = "SELECT * FROM (\n{query}\n) AS compared LIMIT 0"
ROWS = """
SELECT {sink}, compared.key::text, {version}, (to_jsonb(compared.*) - ARRAY['sink', 'key', 'version'])::text
  FROM (\n{query}\n) AS compared
 WHERE compared.key IS NOT NULL
"""
# Several rows of a key are added up.
TOTALS = """
SELECT {sink}, compared.key::text, max({version}), trim_scale(coalesce(sum(compared.total::numeric), 0))::text
  FROM (\n{query}\n) AS compared
 WHERE compared.key IS NOT NULL
 GROUP BY 1, 2
"""
# In the text of a `jsonb`: a fraction that may end with a zero, and a string or a fraction.
ZERO_AT_END = re.compile(r"\.\d*0(?!\d)")
STRING_OR_FRACTION = re.compile(r'"(?:[^"\\]|\\.)*"|\d+\.\d+')

Row = tuple[str, str, int | None, str]  # sink, key, version, and the columns as JSON, or the total


def unusable(file: Path, problem: str, remedy: str) -> Failure:
    """The failure of a comparison that cannot be used."""
    return Failure(f"{file}: {problem}", remedy, code="comparison-unusable")


@contextmanager
def query_errors(connection: extensions.connection, file: Path) -> Iterator[None]:
    """A query that the database refuses is a mistake in its file, unless the database is the cause."""
    try:
        yield
    except (psycopg2.ProgrammingError, psycopg2.DataError) as error:
        reason = reason_of(error)
        remedy = "correct the query"
        if isinstance(error, psycopg2.errors.UndefinedTable):
            remedy = "`outbox migrate`, or correct the query"
        elif isinstance(error, psycopg2.errors.InsufficientPrivilege):
            remedy = f"let a migration GRANT SELECT to {connection.info.user}"
        raise unusable(file, f"the database refuses the query: {reason}", remedy) from error


def columns_of(connection: extensions.connection, query: str) -> list[str]:
    """The columns that a query returns."""
    with connection.cursor() as cursor:
        cursor.execute(sql.SQL(COLUMNS).format(query=sql.SQL(query)))
        return [column.name for column in cursor.description or ()]


def read(connection: extensions.connection, query: str, names: Collection[str], *, by_sink: bool) -> Iterator[Row]:
    """The totals or rows that a query with columns of these names returns. Rows without a key are left out. Equal rows
    have equal texts.
    """
    statement = sql.SQL(TOTALS if "total" in names else ROWS).format(
        sink=sql.SQL("compared.sink" if by_sink else "''"),
        version=sql.SQL("compared.version::bigint" if "version" in names else "NULL::bigint"),
        query=sql.SQL(query),
    )
    return ((sink, key, version, normal(columns)) for sink, key, version, columns in stream(connection, statement))


def stream(
    connection: extensions.connection,
    query: str | sql.Composable,
    values: Mapping[str, object] | Sequence[object] | None = None,
) -> Iterator[tuple[Any, ...]]:
    """The rows of a query, by a cursor on the server: they may be more than memory holds."""
    with connection.cursor("rows") as cursor:
        cursor.itersize = FETCH_ROWS
        cursor.execute(query, values)
        yield from cursor


def normal(columns: str) -> str:
    """The text of a ``jsonb`` without zeros at the end of fractions: Postgres keeps them, and compares by value."""
    if not ZERO_AT_END.search(columns):
        return columns
    return STRING_OR_FRACTION.sub(lambda one: one[0] if one[0][0] == '"' else one[0].rstrip("0").rstrip("."), columns)


class Difference(NamedTuple):
    """How the rows of a key differ: by column the values of the source and of the sink, where they are not equal."""

    key: str
    row: Literal["differs", "missing", "surplus"]  # in the sink
    columns: Mapping[str, tuple[Any, Any]]

    @classmethod
    def of(cls, key: str, source: str | None, sink: str | None) -> Difference:
        """The difference of two rows. None stands for a row that does not exist."""
        of_source, of_sink = _values(source), _values(sink)
        columns = {
            name: (of_source.get(name), of_sink.get(name))
            for name in sorted(of_source.keys() | of_sink.keys())
            if source is None or sink is None or _json(of_source[name]) != _json(of_sink[name])
        }
        return cls(key, "surplus" if source is None else "missing" if sink is None else "differs", columns)

    @property
    def without_values(self) -> Difference:
        """The difference for a report of personal data."""
        return self._replace(columns=dict.fromkeys(self.columns, (HIDDEN, HIDDEN)))

    @property
    def summary(self) -> str:
        """The key, and which columns differ."""
        return f"{self.key} {', '.join(self.columns) if self.row == 'differs' else self.row}"

    @property
    def lines(self) -> Iterator[str]:
        """The columns with their values as JSON."""
        for name, (source, sink) in self.columns.items():
            if self.row == "differs":
                yield f"{name}: {_cut(source)} in the source, {_cut(sink)} in the sink"
            else:
                yield f"{name}: {_cut(source if self.row == 'missing' else sink)}"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        columns = {name: {"source": _raw(one), "sink": _raw(other)} for name, (one, other) in self.columns.items()}
        return {"key": self.key, "row": self.row, "columns": columns}


@dataclass
class Differences:
    """How many keys differ, and the worst of them: those with the most columns that differ."""

    count: int = 0
    kept: int = KEPT
    _found: list[Difference] = field(default_factory=list)

    def add(self, difference: Difference) -> None:
        """Count a key."""
        self.count += 1
        self._found.append(difference)
        if len(self._found) > 2 * self.kept:
            self._found = self.worst

    @property
    def worst(self) -> list[Difference]:
        """The worst of them, the worst first."""
        return sorted(self._found, key=lambda one: (-len(one.columns), one.key))[: self.kept]


def _values(columns: str | None) -> dict[str, Any]:
    return {} if columns is None else json.loads(columns, parse_int=Decimal, parse_float=Decimal)


def _json(value: object) -> str:
    return msgspec.json.Encoder(decimal_format="number").encode(value).decode()


def _cut(value: object) -> str:
    """A value as JSON, or the beginning of that."""
    text = _json(value)
    return text if len(text) <= VALUE_MAX_CHARACTERS else f"{text[:VALUE_MAX_CHARACTERS]}…"


def _raw(value: object) -> msgspec.Raw | str:
    text = _cut(value)
    return text if text.endswith("…") else msgspec.Raw(text.encode())
