"""The totals and rows of comparisons: which columns both sides have, and which keys differ (`outbox.sink.rows`).

They are in the store of a check, not in memory. Of the keys that differ, Python judges one after the other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from psycopg2 import extensions

from outbox.audit.declared import EXACT, Declared
from outbox.base.database import connect
from outbox.base.settings import Settings, SourceRole
from outbox.sink import rows
from outbox.sink.comparison_files import Comparison
from outbox.sink.rows import NOT_COMPARED, columns_of, query_errors, unusable

if TYPE_CHECKING:
    from outbox.audit.store import Store

PASS_ROWS = 500_000  # as many as DuckDB joins within its memory
SOURCE, SINK = "source_rows", "sink_rows"  # tables of the store
DIFFERING = """
SELECT key, source.version, sink.version, source.columns, sink.columns
  FROM (FROM source_rows WHERE comparison = $comparison AND hash(key) % $passes = $number) AS source
  FULL JOIN (FROM sink_rows WHERE comparison = $comparison AND sink = $sink AND hash(key) % $passes = $number) AS sink
  USING (key)
 WHERE source.columns IS DISTINCT FROM sink.columns OR source.version > sink.version
"""
OF_SIDE = "FROM {table} WHERE comparison = $comparison AND sink = $sink"
SEVERAL = f"SELECT key {OF_SIDE} GROUP BY key HAVING count(*) > 1 LIMIT 1"
OTHER_KEY = """
SELECT min(key) FROM (FROM source_rows WHERE comparison = $comparison)
  ANTI JOIN (FROM source_versions WHERE topic IN (SELECT unnest($topics))) USING (key)
"""


def described(settings: Settings, declared: Declared) -> Declared:
    """The declarations, with the columns of the comparisons of rows.

    Raises Failure if the source cannot be read, or if a comparison cannot be used.
    """
    with closing(connect(settings, SourceRole.AUDITOR)) as source:
        found = {one.id: describe(source, one) for one in declared.all_comparisons}
    comparisons = {sink: [found[one.id] for one in of_sink] for sink, of_sink in declared.comparisons.items()}
    return replace(declared, comparisons=comparisons)


def describe(source: extensions.connection, comparison: Comparison) -> Comparison:
    """A comparison with its columns, if it compares rows. Raises Failure if it cannot be used."""
    names = _columns(source, comparison, comparison.source)
    columns = [name for name in names if name not in NOT_COMPARED]
    if comparison.table is None and (comparison.sink is None or "total" in names or not columns):
        _require_total(comparison, "source", names, {"key", "total"})
        return comparison
    if "key" not in names or not columns or "total" in names or comparison.adds:
        raise unusable(
            comparison.file,
            f"it compares rows, and [source] returns {', '.join(names)}",
            "let it return key and the columns to compare, none of them called total; it has no line `adds` either",
        )
    query = comparison.table.query([name for name in names if name != "key"]) if comparison.table else comparison.sink
    return replace(comparison, sink=query, columns=tuple(columns))


def read_source(connection: extensions.connection, comparison: Comparison) -> Iterator[rows.Row]:
    """The totals or rows of the source."""
    names = _columns(connection, comparison, comparison.source)
    with query_errors(connection, comparison.file):
        yield from rows.read(connection, comparison.source, names, by_sink=False)


def read_sinks(connection: extensions.connection, comparison: Comparison) -> Iterator[rows.Row]:
    """The totals or rows of all sinks. Raises Failure if the query does not return the columns that it has to."""
    names = _columns(connection, comparison, comparison.sink or "")
    if not comparison.columns:
        _require_total(comparison, "sink", names, {"sink", "key", "total"})
    elif others := sorted({"sink", "key", *comparison.columns} ^ {*names} - {"version"}):
        raise unusable(
            comparison.file,
            f"[source] and [sink] return different columns: {', '.join(others)}",
            "let both return the same ones",
        )
    with query_errors(connection, comparison.file):
        yield from rows.read(connection, comparison.sink or "", names, by_sink=True)


def _columns(connection: extensions.connection, comparison: Comparison, query: str) -> list[str]:
    with query_errors(connection, comparison.file):
        return columns_of(connection, query)


def _require_total(comparison: Comparison, section: str, names: Collection[str], required: set[str]) -> None:
    if lacking := required.difference(names):
        raise unusable(
            comparison.file,
            f"[{section}] has no column {', '.join(sorted(lacking))}",
            f"let it return {', '.join(sorted(required))}",
        )


def load_rows(store: Store, table: str, read: Iterable[tuple[Comparison, Iterable[rows.Row]]]) -> None:
    """Put the totals and rows of a side into the store."""
    store.load(table, store.ROWS, ((one.number, *row) for one, of_one in read for row in of_one))


class ComparedRows:
    """The totals or rows of one comparison and of one sink in the store."""

    def __init__(self, store: Store, comparison: Comparison, sink: str) -> None:
        self.comparison = comparison
        self._store, self._sink = store, sink

    def count(self, table: str = SOURCE) -> int:
        """How many keys the source has; or with the other table, the sink."""
        [(count,)] = self._rows(f"SELECT count(*) {OF_SIDE}", table)
        return int(count)

    def totals(self, table: str = SOURCE) -> dict[str, Decimal]:
        """By key the totals of a side."""
        return {key: Decimal(total) for key, total in self._rows(f"SELECT key, columns {OF_SIDE}", table)}

    def versions(self) -> dict[str, int]:
        """By key the versions of the sink, where it has one."""
        return dict(self._rows(f"SELECT key, version {OF_SIDE} AND version IS NOT NULL", SINK))

    @property
    def have_versions(self) -> bool:
        """Whether the queries of both sides return versions, as far as their rows tell."""
        counts = (self._rows(f"SELECT count(*), count(version) {OF_SIDE}", table) for table in (SOURCE, SINK))
        return all(versions or not rows for [(rows, versions)] in counts)

    def differing(self) -> Iterator[tuple[str, int | None, int | None, str | None, str | None]]:
        """The keys whose totals or rows differ, or of which the source has a later version: with the versions of both
        sides, and with their totals or rows. Read them to the end: raises Failure if a side has several rows of a key.
        """
        passes, is_equal = 1 + max(self.count(), self.count(SINK)) // PASS_ROWS, True
        for number in range(passes):
            values = {"comparison": self.comparison.number, "sink": self._sink, "passes": passes, "number": number}
            for found in self._store.rows(DIFFERING, values):
                is_equal = False
                yield found
        if not is_equal:  # otherwise rows of one key are equal too
            self._require_one_row_per_key()

    def _require_one_row_per_key(self) -> None:
        for table, section in ((SOURCE, "source"), (SINK, "sink")):
            for (key,) in list(self._rows(SEVERAL, table)):
                raise unusable(
                    self.comparison.file,
                    f"[{section}] returns several rows of key {key}",
                    "let it return one row per key, for example by jsonb_agg",
                )

    def other_key(self, topics: Collection[int]) -> str | None:
        """A key that no event on these topics has, as the source says. None if all are keys of events."""
        [(key,)] = self._store.rows(OTHER_KEY, {"comparison": self.comparison.number, "topics": list(topics)})
        return None if key is None else str(key)

    def _rows(self, query: str, table: str) -> Iterator[tuple[Any, ...]]:
        values = {"comparison": self.comparison.number, "sink": self._sink if table == SINK else ""}
        return self._store.rows(query.format(table=table), values)


def difference_of(source: str | None, sink: str | None) -> Decimal:
    """The sink's total minus the source's. A key without a total has 0."""
    return EXACT.subtract(Decimal(sink or 0), Decimal(source or 0))
