"""What the Delta table of a sink holds, read without Spark by the optional package `deltalake`.

Each commit of the sink says how far its events go, so one version of the table is a consistent state. Dead letters are
read after the table. A letter is written before the table passes its event, and closed after the table has it. So the
open or replayed letters whose event the table lacks are what it had not applied.
"""

from __future__ import annotations

import importlib.util
import json
import uuid
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING

from outbox.base.errors import Failure
from outbox.base.settings import Settings
from outbox.sink.state import TargetState

if TYPE_CHECKING:
    import pyarrow as pa
    from deltalake import DeltaTable

UNREAD = "not compared: the package deltalake, which reads its table, is not installed (pip install -e '.[lakehouse]')"
COMMITS = 1000  # searched for the sink's last one: OPTIMIZE and the like commit too


@dataclass(frozen=True)
class DeltaState(TargetState):
    """One version of a sink's table; an empty one if there is no table."""

    delta: DeltaTable | None = None

    def lacks(self, event_ids: Collection[str]) -> frozenset[str]:
        there = set[str]()
        if self.delta is not None and event_ids:
            wanted = ", ".join(f"'{uuid.UUID(event_id)}'" for event_id in event_ids)
            found = _query(self.delta, f"SELECT event_id FROM events WHERE event_id IN ({wanted})")  # noqa: S608
            there.update(found["event_id"].to_pylist())
        return frozenset(event_ids) - there


def location(settings: Settings, sink: str) -> str:
    """The URI of a sink's table, written as Hadoop reads it: nothing is percent-encoded."""
    return f"{settings.lakehouse.rstrip('/')}/{sink}"


def read(settings: Settings, sink: str, totals_query: Path) -> DeltaState:
    """The newest version of a sink's table. Raises Failure if it cannot be read."""
    if importlib.util.find_spec("deltalake") is None:
        return DeltaState(unread=UNREAD)
    from deltalake import DeltaTable
    from deltalake.exceptions import DeltaError

    uri = location(settings, sink).removeprefix("file://")  # it would decode what is not encoded
    try:
        if not DeltaTable.is_deltatable(uri):
            return DeltaState()
        delta = DeltaTable(uri)
        topic, positions = _reached(delta)
        totals: dict[str, Decimal] = defaultdict(Decimal)
        versions: dict[str, int] = defaultdict(int)
        for row in _query(delta, totals_query.read_text()).to_pylist():
            totals[row["key"]] += row["total"]
            versions[row["key"]] = max(versions[row["key"]], row["version"])
    except DeltaError as error:
        reason = str(error).partition("\n")[0]
        raise Failure(f"sink {sink}: reading its table at {uri}: {reason}", code="table-unreadable") from error
    return DeltaState(topic, positions, totals, versions, delta=delta)


def _reached(delta: DeltaTable) -> tuple[str | None, dict[int, int]]:
    """The topic of the last commit that is a sink's, and how far it goes."""
    for commit in delta.history(COMMITS):
        if commit["version"] <= delta.version() and "userMetadata" in commit:
            said = json.loads(commit["userMetadata"])
            return said["topic"], {int(partition): offset for partition, offset in said["next_offsets"].items()}
    return None, {}


def _query(delta: DeltaTable, sql: str) -> pa.Table:
    import pyarrow as pa
    from deltalake import QueryBuilder

    return pa.table(QueryBuilder().register("events", delta).execute(sql).read_all())
