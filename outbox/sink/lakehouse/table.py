"""What the Delta table of a sink says, read without Spark: by the package `deltalake`, which is optional.

A commit of the sink says with the events how far they go, so one version of the table is a state of its own: no commit
in between makes it wrong. That leaves the letters of that moment. A letter is written before the table passes its
event, and closed after the table has it; so of the letters that are read after the table, open ones or replayed, those
whose event the table does not have are what it had not applied.
"""

from __future__ import annotations

import importlib.util
import json
import uuid
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import TYPE_CHECKING

from outbox.base.errors import Failure
from outbox.base.settings import Settings
from outbox.sink import job
from outbox.sink.job import Job

if TYPE_CHECKING:
    import pyarrow as pa
    from deltalake import DeltaTable

UNREAD = "not compared: the package deltalake, which reads its table, is not installed (pip install -e '.[lakehouse]')"
COMMITS = 1000  # looked through for the sink's last one: others are those of OPTIMIZE and the like


@dataclass(frozen=True)
class Table:
    """One version of a sink's table; an empty one if there is no table."""

    topic: str | None = None  # None if no commit that is kept says how far it goes
    positions: Mapping[int, int] = field(default_factory=dict)  # by partition, the next offset to merge
    totals: Mapping[str, Decimal] = field(default_factory=dict)  # by key
    versions: Mapping[str, int] = field(default_factory=dict)  # by key, the highest merged
    delta: DeltaTable | None = None

    def lacks(self, event_ids: Collection[str]) -> frozenset[bytes]:
        """Those of the events that the table does not have."""
        there = set[str]()
        if self.delta is not None and event_ids:
            wanted = ", ".join(f"'{uuid.UUID(event_id)}'" for event_id in event_ids)
            found = _query(self.delta, f"SELECT event_id FROM events WHERE event_id IN ({wanted})")  # noqa: S608
            there.update(found["event_id"].to_pylist())
        return frozenset(uuid.UUID(event_id).bytes for event_id in event_ids if event_id not in there)


def read(settings: Settings) -> dict[str, Table | None]:
    """The newest version of the table of each sink that is one; None if the package is not installed.

    Raises Failure if one cannot be read.
    """
    is_installed = importlib.util.find_spec("deltalake") is not None
    tables = {name: one.job for name, one in job.sinks(settings).items() if one.job.table is not None}
    return {name: _read(settings, name, of) if is_installed else None for name, of in tables.items()}


def location(settings: Settings, sink: str) -> str:
    """The URI of a sink's table, written as Hadoop reads it: nothing is percent-encoded."""
    return f"{settings.lakehouse.rstrip('/')}/{sink}"


def _read(settings: Settings, sink: str, of: Job) -> Table:
    from deltalake import DeltaTable
    from deltalake.exceptions import DeltaError

    uri = location(settings, sink).removeprefix("file://")  # it would decode what is not encoded
    try:
        if not DeltaTable.is_deltatable(uri):
            return Table()
        delta = DeltaTable(uri)
        topic, positions = _reached(delta)
        totals: dict[str, Decimal] = defaultdict(Decimal)
        versions: dict[str, int] = defaultdict(int)
        for row in _query(delta, of.projection.read_text()).to_pylist():
            totals[row["key"]] += row["total"]
            versions[row["key"]] = max(versions[row["key"]], row["version"])
    except DeltaError as error:
        raise Failure(f"sink {sink}: reading its table at {uri}: {str(error).partition(chr(10))[0]}") from error
    return Table(topic, positions, totals, versions, delta)


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
