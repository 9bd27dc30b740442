"""The Iceberg table of a sink, read without Spark by the optional package `pyiceberg`.

The sink database has the catalog: a row names the file of the table's newest version. Snapshots of the sink say how far
its events go. Those of compaction say nothing and add no events, so an earlier one counts. If all of the sink's have
expired, the positions in the sink database count: they are the same, unless the sink has died behind its last commit.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from outbox.base.database import connect
from outbox.base.errors import Failure
from outbox.base.heavy import pa, psycopg2
from outbox.base.settings import Settings, SinkRole
from outbox.sink.applying.lakehouse import table
from outbox.sink.spec import TargetState

if TYPE_CHECKING:
    from pyiceberg.table import Table

CATALOG = "outbox"
SAID = "outbox"  # the property of a snapshot with what the sink says
UNREAD = "not compared: pyiceberg, which reads its table, is not installed (extra `iceberg` of outbox-machinery)"
NEWEST = """
SELECT metadata_location FROM public.iceberg_tables
 WHERE catalog_name = %s AND table_namespace = %s AND table_name = 'events'
"""


def read(settings: Settings, sink: str, totals_query: Path) -> TargetState:
    """The newest version of a sink's table; nothing if there is no table. Raises Failure if it cannot be read."""
    if importlib.util.find_spec("pyiceberg") is None:
        return TargetState(unread=UNREAD)
    with opened(settings, sink) as iceberg:
        if iceberg is None:
            return TargetState()
        totals = table.totals(_query(iceberg, totals_query.read_text()), totals_query)
        return TargetState(_reached(iceberg, sink), totals, partial(lacking, iceberg))


@contextmanager
def opened(settings: Settings, sink: str) -> Iterator[Table | None]:
    """The newest version of a sink's table; None if there is no table. An error of the block is a Failure."""
    if importlib.util.find_spec("pyiceberg") is None:
        raise Failure(f"sink {sink}: {UNREAD}", code="table-unreadable")
    import duckdb
    from pyiceberg.table import StaticTable

    newest = ""
    try:
        with closing(connect(settings, SinkRole.AUDITOR)) as connection, connection, connection.cursor() as cursor:
            cursor.execute(NEWEST, [CATALOG, sink])
            newest = (cursor.fetchone() or ("",))[0]
        yield StaticTable.from_metadata(newest) if newest else None
    except (OSError, ValueError, pa.ArrowException, psycopg2.Error, duckdb.Error) as error:
        reason = str(error).partition("\n")[0]
        raise Failure(f"sink {sink}: reading its table at {newest}: {reason}", code="table-unreadable") from error


def lacking(iceberg: Table, event_ids: Collection[str]) -> set[str]:
    """The given events that the table does not have."""
    return table.absent(event_ids, lambda condition: iceberg.scan(condition, selected_fields=("event_id",)).to_arrow())


def _reached(iceberg: Table, sink: str) -> dict[str, dict[int, int]]:
    """How far the newest version goes, as its snapshots say."""
    said, snapshot = list[str](), iceberg.current_snapshot()
    while snapshot is not None:
        said.append(snapshot.summary[SAID] or "" if snapshot.summary else "")
        snapshot = iceberg.snapshot_by_id(snapshot.parent_snapshot_id or -1)
    return table.reached(said, sink)


def _query(iceberg: Table, query: str) -> pa.Table:
    import duckdb

    with duckdb.connect() as connection:
        connection.register("events", iceberg.scan().to_arrow_batch_reader())
        return connection.sql(query).to_arrow_table()
