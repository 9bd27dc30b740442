"""The Delta table of a sink, read without Spark by the optional package `deltalake`.

Each commit of the sink says how far its events go, so one version of the table is a consistent state. Dead letters are
read after the table. A letter is written before the table passes its event, and closed after the table has it. So the
open or replayed letters whose event the table lacks are what it had not applied.
"""

from __future__ import annotations

import importlib.util
import json
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outbox.base.errors import Failure
from outbox.base.heavy import pa
from outbox.base.settings import Settings
from outbox.sink.spec import TargetState

if TYPE_CHECKING:
    from deltalake import DeltaTable

UNREAD = "not compared: deltalake, which reads its table, is not installed (extra `lakehouse` of outbox-machinery)"
COMMITS = 1000  # searched for the sink's last one: OPTIMIZE and the like commit too
IDS_PER_QUERY = 1000


def location(settings: Settings, sink: str) -> str:
    """The URI of a sink's table, written as Hadoop reads it: nothing is percent-encoded."""
    return f"{settings.lakehouse}/{sink}"


def read(settings: Settings, sink: str, totals_query: Path) -> TargetState:
    """The newest version of a sink's table; nothing if there is no table. Raises Failure if it cannot be read."""
    if importlib.util.find_spec("deltalake") is None:
        return TargetState(unread=UNREAD)
    with _opened(settings, sink) as delta:
        if delta is None:
            return TargetState()
        reached = _reached(delta, sink)
        rows = totals(_query(delta, totals_query.read_text()), totals_query)
        return TargetState(reached, rows, partial(lacking, delta))


def totals(found: pa.Table, query: Path) -> list[tuple[Any, Any, Any]]:
    """Key, total and version of each row that a query of totals has found. Raises Failure if it lacks one of the first
    two.
    """
    if lacks := sorted({"key", "total"}.difference(found.column_names)):
        raise Failure(
            f"{query}: it has no column {', '.join(lacks)}", "let it return key and total", code="comparison-unusable"
        )
    return [(row["key"], row["total"], row.get("version")) for row in found.to_pylist()]


def positions(settings: Settings, sink: str) -> dict[str, dict[int, int]]:
    """How far the newest commit of a sink goes, by topic and partition: the next offsets; nothing if there is no table.
    Raises Failure if it cannot be read.
    """
    with _opened(settings, sink) as delta:
        return {} if delta is None else _reached(delta, sink)


def rows(settings: Settings, sink: str) -> dict[str, int]:
    """By event id, how many rows a sink's table has. Raises Failure if there is no table, or if it cannot be read."""
    with _opened(settings, sink) as delta:
        if delta is None:
            raise Failure(f"sink {sink} has no table yet", code="table-unreadable")
        found = _query(delta, "SELECT event_id, count(*) AS times FROM events GROUP BY event_id").to_pylist()
    return {row["event_id"]: row["times"] for row in found}


def erase(
    settings: Settings, sink: str, columns: Collection[str], key: str, events: Collection[str], *, dry_run: bool
) -> dict[str, int]:
    """Delete the rows with a key in one of these columns, of these events if the table has several. Then delete the
    files of former versions, if one of them has such a row: time travel ends there, and a reader of such a version
    fails. Returns how many rows, by place.

    Call it under the sink's lock. Raises Failure if the table has no such column.
    """
    with _opened(settings, sink) as delta:
        if delta is None:
            return {}
        rows_of_key = condition(sink, [field.name for field in delta.schema().fields], columns, key, events)
        query = f"SELECT count(*) AS rows FROM events WHERE {rows_of_key}"  # noqa: S608
        rows = _query(delta, query)["rows"][0].as_py()
        if rows and not dry_run:
            delta.delete(rows_of_key)
        former = _in_former_files(delta, columns, key)
        if former and not dry_run:
            delta.vacuum(0, dry_run=False, enforce_retention_duration=False, full=True)
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


def _in_former_files(delta: DeltaTable, columns: Collection[str], key: str) -> int:
    """How many rows with a key are in files that the newest version does not need."""
    import pyarrow.dataset as ds
    from deltalake.fs import DeltaStorageHandler
    from pyarrow.fs import FileType, PyFileSystem

    files = delta.vacuum(0, dry_run=True, enforce_retention_duration=False, full=True)
    store = PyFileSystem(DeltaStorageHandler(delta.table_uri))
    # The log also names files that an earlier vacuum has deleted.
    found = store.get_file_info([file for file in files if file.endswith(".parquet")])
    data = [file.path for file in found if file.type is FileType.File]
    schema = pa.schema([field for field in pa.schema(delta.schema().to_arrow()) if field.name in columns])
    former = ds.dataset(data, schema, "parquet", filesystem=store)
    return sum(former.count_rows(filter=ds.field(column).cast(pa.string()) == key) for column in columns)


@contextmanager
def _opened(settings: Settings, sink: str) -> Iterator[DeltaTable | None]:
    """The newest version of a sink's table; None if there is no table. An error of the block is a Failure."""
    if importlib.util.find_spec("deltalake") is None:
        raise Failure(f"sink {sink}: {UNREAD}", code="table-unreadable")
    from deltalake import DeltaTable
    from deltalake.exceptions import DeltaError

    uri = location(settings, sink).removeprefix("file://")  # it would decode what is not encoded
    try:
        yield DeltaTable(uri) if DeltaTable.is_deltatable(uri) else None
    except DeltaError as error:
        reason = str(error).partition("\n")[0]
        raise Failure(f"sink {sink}: reading its table at {uri}: {reason}", code="table-unreadable") from error


def lacking(delta: DeltaTable, event_ids: Collection[str]) -> set[str]:
    """The given events that the table does not have."""
    return absent(event_ids, lambda condition: _query(delta, f"SELECT event_id FROM events WHERE {condition}"))  # noqa: S608


def absent(event_ids: Collection[str], found: Callable[[str], pa.Table]) -> set[str]:
    """The given events that are not found by conditions in SQL."""
    wanted, there = sorted(event_ids), set[str]()
    for begin in range(0, len(wanted), IDS_PER_QUERY):
        ids = [f"'{uuid.UUID(event_id)}'" for event_id in wanted[begin : begin + IDS_PER_QUERY]]
        # The range leaves out files that hold none of these ids.
        condition = f"event_id >= {ids[0]} AND event_id <= {ids[-1]} AND event_id IN ({', '.join(ids)})"
        there |= {*found(condition)["event_id"].to_pylist()}
    return {*event_ids} - there


def _reached(delta: DeltaTable, sink: str) -> dict[str, dict[int, int]]:
    """Move to the newest version, and return how far the newest commit goes that has positions of the sink. Others may
    commit too, with any text.
    """
    while True:
        version, commits = delta.version(), delta.history(COMMITS)
        delta.update_incremental()
        if delta.version() == version:  # otherwise the history has commits behind the version, and numbers all wrong
            break
    return reached([commit.get("userMetadata") or "" for commit in commits], sink)


def reached(said: Iterable[str], sink: str) -> dict[str, dict[int, int]]:
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


def _query(delta: DeltaTable, sql: str) -> pa.Table:
    from deltalake import QueryBuilder

    return pa.table(QueryBuilder().register("events", delta).execute(sql).read_all())
