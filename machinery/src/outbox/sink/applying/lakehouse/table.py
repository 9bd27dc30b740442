"""The tables of sinks in a lakehouse, read without Spark: by the optional packages `deltalake` and `pyiceberg`.

Each commit of a sink says how far its events go, so one version of a table is a consistent state. Dead letters are
read after the table. A letter is written before the table passes its event, and closed after the table has it. So the
open or replayed letters whose event the table lacks are what it had not applied.

Of Iceberg the sink database has the catalog: a row names the file of the table's newest version. Snapshots of
compaction say nothing and add no events, so an earlier one counts. If all of the sink's have expired, the positions in
the sink database count: they are the same, unless the sink has died behind its last commit.
"""

from __future__ import annotations

import importlib.util
import json
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from outbox.base.database import connect
from outbox.base.errors import Failure
from outbox.base.heavy import pa, psycopg2
from outbox.base.settings import Settings, SinkRole
from outbox.sink.spec import TargetState

if TYPE_CHECKING:
    from deltalake import DeltaTable

UNREAD = "not compared: {}, which reads its table, is not installed"
CATALOG = "outbox"  # of Iceberg
SAID = "outbox"  # the property of a snapshot of Iceberg with what the sink says
NEWEST = """
SELECT metadata_location FROM public.iceberg_tables
 WHERE catalog_name = %s AND table_namespace = %s AND table_name = 'events'
"""
COMMITS = 1000  # of Delta, searched for the sink's last one: OPTIMIZE and the like commit too
IDS_PER_QUERY = 1000


class Stored(NamedTuple):
    """The newest version of a sink's table."""

    table: Any  # of the package
    said: Iterable[str]  # by its commits, the newest first
    query: Callable[[str], pa.Table]  # SQL over ``events``
    ids: Callable[[str], pa.Table]  # the column ``event_id`` by a condition in SQL


Opened = Callable[[Settings, str], AbstractContextManager[Stored | None]]


def location(settings: Settings, sink: str) -> str:
    """The URI of a sink's table, written as Hadoop reads it: nothing is percent-encoded."""
    return f"{settings.lakehouse}/{sink}"


@contextmanager
def delta(settings: Settings, sink: str) -> Iterator[Stored | None]:
    """A Delta table, or None without one. An error of the block is a Failure."""
    _require("deltalake", sink)
    from deltalake import DeltaTable, QueryBuilder
    from deltalake.exceptions import DeltaError

    uri = location(settings, sink).removeprefix("file://")  # it would decode what is not encoded
    try:
        if not DeltaTable.is_deltatable(uri):
            yield None
            return
        found = DeltaTable(uri)
        said = _said(found)  # this moves the table to its newest version

        def query(text: str) -> pa.Table:
            return pa.table(QueryBuilder().register("events", found).execute(text).read_all())

        yield Stored(found, said, query, lambda condition: query(f"SELECT event_id FROM events WHERE {condition}"))  # noqa: S608
    except DeltaError as error:
        raise _unreadable(sink, uri, error) from error


@contextmanager
def iceberg(settings: Settings, sink: str) -> Iterator[Stored | None]:
    """An Iceberg table, or None without one. An error of the block is a Failure."""
    _require("pyiceberg", sink)
    import duckdb
    from pyiceberg.table import StaticTable

    newest = ""
    try:
        with closing(connect(settings, SinkRole.AUDITOR)) as connection, connection, connection.cursor() as cursor:
            cursor.execute(NEWEST, [CATALOG, sink])
            newest = (cursor.fetchone() or ("",))[0]
        if not newest:
            yield None
            return
        found = StaticTable.from_metadata(newest)
        said, snapshot = list[str](), found.current_snapshot()
        while snapshot is not None:
            said.append(snapshot.summary[SAID] or "" if snapshot.summary else "")
            snapshot = found.snapshot_by_id(snapshot.parent_snapshot_id or -1)

        def query(text: str) -> pa.Table:
            with duckdb.connect() as connection:
                connection.execute("SET enable_progress_bar = false")  # which `python -c` would have on standard output
                connection.register("events", found.scan().to_arrow_batch_reader())
                return connection.sql(text).to_arrow_table()

        yield Stored(found, said, query, lambda text: found.scan(text, selected_fields=("event_id",)).to_arrow())
    except (OSError, ValueError, pa.ArrowException, psycopg2.Error, duckdb.Error) as error:
        raise _unreadable(sink, newest, error) from error


def read(settings: Settings, sink: str, totals_query: Path, opened: Opened = delta) -> TargetState:
    """The newest version of a sink's table; nothing if there is no table. Raises Failure if it cannot be read."""
    package = "deltalake" if opened is delta else "pyiceberg"
    if importlib.util.find_spec(package) is None:
        return TargetState(unread=UNREAD.format(package))
    with opened(settings, sink) as stored:
        if stored is None:
            return TargetState(lacking=frozenset)
        rows = _totals(stored.query(totals_query.read_text()), totals_query)
        return TargetState(_reached(stored.said, sink), rows, partial(lacking, stored))


def _totals(found: pa.Table, query: Path) -> list[tuple[Any, Any, Any]]:
    """Key, total and version of each row that a query of totals has found. Raises Failure if it lacks one of the first
    two.
    """
    if lacks := sorted({"key", "total"}.difference(found.column_names)):
        raise Failure(
            f"{query}: it has no column {', '.join(lacks)}", "let it return key and total", code="comparison-unusable"
        )
    return [(row["key"], row["total"], row.get("version")) for row in found.to_pylist()]


def lacking(stored: Stored, event_ids: Collection[str]) -> set[str]:
    """The given events that the table does not have."""
    wanted, there = sorted(event_ids), set[str]()
    for begin in range(0, len(wanted), IDS_PER_QUERY):
        ids = [f"'{uuid.UUID(event_id)}'" for event_id in wanted[begin : begin + IDS_PER_QUERY]]
        # The range leaves out files that hold none of these ids.
        condition = f"event_id >= {ids[0]} AND event_id <= {ids[-1]} AND event_id IN ({', '.join(ids)})"
        there |= {*stored.ids(condition)["event_id"].to_pylist()}
    return {*event_ids} - there


def rows(settings: Settings, sink: str) -> dict[str, int]:
    """By event id, how many rows a sink's Delta table has. Raises Failure without a table, or if it cannot be read."""
    with delta(settings, sink) as stored:
        if stored is None:
            raise Failure(f"sink {sink} has no table yet", code="table-unreadable")
        found = stored.query("SELECT event_id, count(*) AS times FROM events GROUP BY event_id").to_pylist()
    return {row["event_id"]: row["times"] for row in found}


def erase(
    settings: Settings, sink: str, columns: Collection[str], key: str, events: Collection[str], *, dry_run: bool
) -> dict[str, int]:
    """Delete the rows with a key in one of these columns, of these events if the table has several. Then delete the
    files of former versions, if one of them has such a row: time travel ends there, and a reader of such a version
    fails. Returns how many rows, by place.

    Call it under the sink's lock. Raises Failure if the table has no such column.
    """
    with delta(settings, sink) as stored:
        if stored is None:
            return {}
        table: DeltaTable = stored.table
        rows_of_key = condition(sink, [field.name for field in table.schema().fields], columns, key, events)
        found = stored.query(f"SELECT count(*) AS rows FROM events WHERE {rows_of_key}")  # noqa: S608
        rows = found["rows"][0].as_py()
        if rows and not dry_run:
            table.delete(rows_of_key)
        former = _in_former_files(table, columns, key)
        if former and not dry_run:
            table.vacuum(0, dry_run=False, enforce_retention_duration=False, full=True)
        return erased(sink, rows, former)


def condition(
    sink: str,
    there: Collection[str],
    columns: Collection[str],
    key: str,
    events: Collection[str],
    *,
    texts: tuple[Callable[[str], str], str] = (lambda value: "'{}'".format(value.replace("'", "''")), '"'),
) -> str:
    """SQL that selects the rows of a key. ``texts`` is how its dialect writes a text, and quotes a name.

    Raises Failure if the table, which has the columns ``there``, lacks one.
    """
    if lacks := {*columns, *(["event_type"] if events else [])}.difference(there):
        raise Failure(
            f"sink {sink}: its table has no column {', '.join(sorted(lacks))}",
            "delete the rows of the key yourself, and what the format keeps of former versions",
            code="erase-unsupported",
        )
    text, quote = texts
    of_key = " OR ".join(f"CAST({quote}{column}{quote} AS STRING) = {text(key)}" for column in sorted(columns))
    return f"({of_key}) AND event_type IN ({', '.join(map(text, events))})" if events else of_key


def erased(sink: str, rows: int, former: int) -> dict[str, int]:
    """The rows of a key by place."""
    return {f"table of sink {sink}": rows, f"former files of the table of sink {sink}": former}


def _in_former_files(table: DeltaTable, columns: Collection[str], key: str) -> int:
    """How many rows with a key are in files that the newest version does not need."""
    import pyarrow.dataset as ds
    from deltalake.fs import DeltaStorageHandler
    from pyarrow.fs import FileType, PyFileSystem

    files = table.vacuum(0, dry_run=True, enforce_retention_duration=False, full=True)
    store = PyFileSystem(DeltaStorageHandler(table.table_uri))
    # The log also names files that an earlier vacuum has deleted.
    found = store.get_file_info([file for file in files if file.endswith(".parquet")])
    data = [file.path for file in found if file.type is FileType.File]
    schema = pa.schema([field for field in pa.schema(table.schema().to_arrow()) if field.name in columns])
    former = ds.dataset(data, schema, "parquet", filesystem=store)
    return sum(former.count_rows(filter=ds.field(column).cast(pa.string()) == key) for column in columns)


def _said(table: DeltaTable) -> list[str]:
    """Move to the newest version, and return what its commits say, the newest first. Others may commit too, with any
    text.
    """
    while True:
        version, commits = table.version(), table.history(COMMITS)
        table.update_incremental()
        if table.version() == version:  # otherwise the history has commits behind the version, and numbers all wrong
            return [commit.get("userMetadata") or "" for commit in commits]


def _reached(said: Iterable[str], sink: str) -> dict[str, dict[int, int]]:
    """How far a sink's events go, by what its commits and those of others have said, the newest first. A driver that
    has lost its fence may commit late, and says less than is there: the latest epoch counts.
    """
    ours = [one for one in map(_parsed, said) if one.get("sink") == sink and "positions" in one]
    newest: Mapping[str, Any] = max(ours, key=lambda one: one.get("epoch", 0), default={"positions": {}})
    return {
        topic: {int(number): at for number, at in of_topic.items()} for topic, of_topic in newest["positions"].items()
    }


def _parsed(said: str) -> Mapping[str, Any]:
    try:
        parsed = json.loads(said)
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _require(package: str, sink: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise Failure(f"sink {sink}: {UNREAD.format(package)}", code="table-unreadable")


def _unreadable(sink: str, place: str, error: Exception) -> Failure:
    reason = str(error).partition("\n")[0]
    return Failure(f"sink {sink}: reading its table at {place}: {reason}", code="table-unreadable")
