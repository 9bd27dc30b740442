"""The Iceberg table of a sink, read without Spark by the optional package `pyiceberg`.

The sink database has the catalog: a row names the file of the table's newest version. Snapshots of the sink say how far
its events go. Those of compaction say nothing and add no events, so an earlier one counts. If all of the sink's have
expired, the positions in the sink database count: they are the same, unless the sink has died behind its last commit.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from outbox.base.database import connect
from outbox.base.errors import Failure
from outbox.base.heavy import pa, psycopg2
from outbox.base.sections import COMMENT
from outbox.base.settings import Settings, SinkRole
from outbox.sink.applying.lakehouse import table
from outbox.sink.spec import SinkSpec, TargetState, unusable

if TYPE_CHECKING:
    from pyiceberg.table import Table

CATALOG = "outbox"
SAID = "outbox"  # the property of a snapshot with what the sink says
UNREAD = "not compared: pyiceberg, which reads its table, is not installed (extra `iceberg` of outbox-machinery)"
NEWEST = """
SELECT metadata_location FROM public.iceberg_tables
 WHERE catalog_name = %s AND table_namespace = %s AND table_name = 'events'
"""
# Iceberg appends what a MERGE without it inserts, and looks for nothing that was appended meanwhile.
CHECKED = re.compile(r"\bWHEN\s+MATCHED\b", re.IGNORECASE)


def require_checked(spec: SinkSpec) -> None:
    """Raises Failure if the commit of the sink's MERGE would not look for rows that another one has added."""
    if CHECKED.search(COMMENT.sub("", spec.strategy.select)) is None:
        raise unusable(
            spec.job,
            f"the MERGE of its strategy {spec.strategy.name} only inserts, and Iceberg commits that unchecked",
            "write `WHEN MATCHED AND FALSE THEN DELETE` before WHEN NOT MATCHED",
        )


def read(settings: Settings, sink: str, totals_query: Path) -> TargetState:
    """The newest version of a sink's table; nothing if there is no table. Raises Failure if it cannot be read."""
    if importlib.util.find_spec("pyiceberg") is None:
        return TargetState(unread=UNREAD)
    with opened(settings, sink) as iceberg:
        if iceberg is None:
            return TargetState()
        return TargetState(
            _reached(iceberg, sink),
            table.totals(_query(iceberg, totals_query), totals_query),
            partial(lacking, iceberg),
        )


@contextmanager
def opened(settings: Settings, sink: str) -> Iterator[Table | None]:
    """The newest version of a sink's table; None if there is no table. An error of the block is a Failure."""
    from pyiceberg.table import StaticTable

    with closing(connect(settings, SinkRole.AUDITOR)) as connection, connection, connection.cursor() as cursor:
        try:
            cursor.execute(NEWEST, [CATALOG, sink])
        except psycopg2.errors.UndefinedTable:
            yield None
            return
        found = cursor.fetchone()
    if found is None:
        yield None
        return
    try:
        yield StaticTable.from_metadata(found[0])
    except (OSError, ValueError, pa.ArrowException) as error:
        reason = str(error).partition("\n")[0]
        raise Failure(f"sink {sink}: reading its table at {found[0]}: {reason}", code="table-unreadable") from error


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


def _query(iceberg: Table, query: Path) -> pa.Table:
    import duckdb

    with duckdb.connect() as connection:
        connection.register("events", iceberg.scan().to_arrow_batch_reader())
        return connection.sql(query.read_text()).to_arrow_table()
