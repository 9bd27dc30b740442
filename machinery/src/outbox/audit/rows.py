"""Compare rows: which comparisons do, what both sides have, and which keys differ (`outbox.sink.rows`).

The rows are in the store of a check, not in memory. Of the keys that differ, Python judges one after the other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

from psycopg2 import extensions

from outbox.audit.comparison_files import Comparison
from outbox.audit.declared import Declared
from outbox.base.database import connect
from outbox.base.settings import Settings, SourceRole
from outbox.sink import rows
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
COUNT = "SELECT count(*) FROM {table} WHERE comparison = $comparison AND sink = $sink"
SEVERAL = """
SELECT key FROM {table} WHERE comparison = $comparison AND sink = $sink GROUP BY key HAVING count(*) > 1 LIMIT 1
"""
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
    if comparison.sink is None and comparison.table is None:
        return comparison
    with query_errors(source, comparison.file):
        names = columns_of(source, comparison.source)
    columns = [name for name in names if name not in NOT_COMPARED]
    if comparison.table is None and ("total" in names or not columns):
        return comparison
    if "key" not in names or not columns or "total" in names or comparison.adds:
        raise unusable(
            comparison.file,
            f"it compares rows, and [source] returns {', '.join(names)}",
            "let it return key and the columns to compare, none of them called total; it has no line `adds` either",
        )
    query = comparison.table.query([name for name in names if name != "key"]) if comparison.table else comparison.sink
    return replace(comparison, sink=query, columns=tuple(columns), has_version="version" in names)


def read_source(connection: extensions.connection, comparison: Comparison) -> Iterator[rows.Row]:
    """The rows of the source."""
    with query_errors(connection, comparison.file):
        yield from rows.read(connection, comparison.source, by_sink=False, has_version=comparison.has_version)


def read_sinks(connection: extensions.connection, comparison: Comparison) -> Iterator[rows.Row]:
    """The rows of all sinks. Raises Failure if the query does not return the columns of the source."""
    query, due = comparison.sink or "", {"sink", "key", *comparison.columns}
    with query_errors(connection, comparison.file):
        found = set(columns_of(connection, query))
        if others := sorted(due ^ found - {"version"} | ({"version"} - found if comparison.has_version else set())):
            raise unusable(
                comparison.file,
                f"[source] and [sink] return different columns: {', '.join(others)}",
                "let both return the same ones",
            )
        yield from rows.read(connection, query, by_sink=True, has_version=comparison.has_version)


def load_source(store: Store, connection: extensions.connection, declared: Declared) -> None:
    """Put the rows of the source into the store."""
    _load(store, SOURCE, (read_source(connection, one) for one in declared.row_comparisons))


def load_sinks(store: Store, connection: extensions.connection, declared: Declared) -> None:
    """Put the rows of all sinks into the store."""
    _load(store, SINK, (read_sinks(connection, one) for one in declared.row_comparisons))


def _load(store: Store, table: str, read: Iterable[Iterable[rows.Row]]) -> None:
    store.load(table, store.ROWS, ((number, *row) for number, of_one in enumerate(read) for row in of_one))


class ComparedRows:
    """The rows of one comparison and of one sink in the store."""

    def __init__(self, store: Store, comparison: Comparison, number: int, sink: str) -> None:
        self.comparison = comparison
        self._store, self._number, self._sink = store, number, sink

    def count(self, table: str = SOURCE) -> int:
        """How many rows the source has; or with the other table, the sink."""
        values = {"comparison": self._number, "sink": self._sink if table == SINK else ""}
        [(count,)] = self._store.rows(COUNT.format(table=table), values)
        return int(count)

    def differing(self) -> Iterator[tuple[str, int | None, int | None, str | None, str | None]]:
        """The keys whose rows differ, or of which the source has a later version: with the versions of both sides, and
        with their rows. Read them to the end: raises Failure if a side has several rows of a key.
        """
        passes, is_equal = 1 + max(self.count(), self.count(SINK)) // PASS_ROWS, True
        for number in range(passes):
            values = {"comparison": self._number, "sink": self._sink, "passes": passes, "number": number}
            for found in self._store.rows(DIFFERING, values):
                is_equal = False
                yield found
        if not is_equal:  # otherwise rows of one key are equal too
            self._require_one_row_per_key()

    def _require_one_row_per_key(self) -> None:
        for table, sink, section in ((SOURCE, "", "source"), (SINK, self._sink, "sink")):
            values = {"comparison": self._number, "sink": sink}
            for (key,) in list(self._store.rows(SEVERAL.format(table=table), values)):
                raise unusable(
                    self.comparison.file,
                    f"[{section}] returns several rows of key {key}",
                    "let it return one row per key, for example by jsonb_agg",
                )

    def other_key(self, topics: Collection[int]) -> str | None:
        """A key that no event on these topics has, as the source says. None if all are keys of events."""
        values = {"comparison": self._number, "topics": list(topics)}
        [(key,)] = self._store.rows(OTHER_KEY, values)
        return None if key is None else str(key)
