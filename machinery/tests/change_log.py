"""Changes of items as the sink `changes` stages them, and a table of items that makes them up as a log has them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from outbox.base.database import connect
from outbox.base.settings import Settings, SinkRole, load
from outbox.sink import discovery
from outbox.sink.applying.postgres.target import PostgresWriter
from outbox.sink.decoding.batch import Batch
from outbox.sink.decoding.decoder import DecodedEvent
from outbox.sink.decoding.records import DeadRecord, Decoded
from outbox.sink.remembering.strategy import Strategy
from stock.sinks.changes.records import CHANGE, TABLE, change_id
from tests.support.made_events import fetch, nth_key
from tests.support.sink_driver import projections_in

NAME = "changes"
SPEC = discovery.sinks(load(environment=False))[NAME]
[(TOPIC, DECODER)] = SPEC.decoders.items()
PROJECTION = SPEC.job.projections / "stock.sql"
TOPIC_ID = "topic-1"
STEP = 8  # records of the log begin at multiples of it


@dataclass(frozen=True)
class Change:
    """A change of a row; of a deletion the state is not told."""

    item_id: str
    op: str
    lsn: int
    stock: int | None = None
    version: int | None = None
    unit: str | None = "KGM"
    table_name: str = TABLE

    @property
    def event_id(self) -> str:
        """The id that the sink gives it."""
        return change_id(self.item_id, self.lsn, self.op)

    def record(self, **changes: Any) -> tuple[bytes, bytes]:
        """Key and value as Debezium writes them; of a deletion it makes up what the log does not have.

        ``changes`` are columns of the row to be other than they should be.
        """
        state = {"id": self.item_id, "unit": self.unit, "stock": self.stock, "version": self.version, **changes}
        made_up = {"id": self.item_id, "unit": "", "stock": 0, "version": 0}
        envelope = {
            "before": made_up if self.op == "d" else None,
            "after": None if self.op == "d" else state,
            "source": {"schema": "public", "table": self.table_name, "lsn": self.lsn, "snapshot": "false"},
            "op": self.op,
            "ts_ms": 1_795_273_008_225,
        }
        return json.dumps({"id": self.item_id}).encode(), json.dumps(envelope).encode()


class Items:
    """A table of items and its log. Quantities are such that no two mistakes cancel.

    ``first`` is the number of its first item: two tables share none.
    """

    def __init__(self, first: int = 0) -> None:
        self.log: list[Change] = []
        self._next_item = first
        self._lsn = 1000 + (first << 8)
        self._quantity = 1
        self.rows: dict[str, tuple[int, int]] = {}  # stock and version

    def add(self) -> str:
        """Insert an item."""
        self._next_item += 1
        made = nth_key(self._next_item)
        self._set(made, "c", 0, 0)
        return made

    def move(self, item: str) -> None:
        """Change a stock."""
        self.log.append(self._move(item))

    def rename(self, old: str, new: str | None = None) -> str:
        """Change a primary key, which is a deletion and an insert at one LSN."""
        if new is None:
            self._next_item += 1
            new = nth_key(self._next_item)
        stock, version = self.rows.pop(old)
        self.log.append(Change(old, "d", self._lsn, unit=None))
        # The projection's limit: a key that another row takes over must go on above its last version.
        before = max((change.version or 0 for change in self.log if change.item_id == new), default=0)
        self._set(new, "c", stock, max(version, before) + 1)
        return new

    def snapshot(self, meanwhile: str | None = None) -> None:
        """Send every row again, with the LSN at which the next change will begin.

        ``meanwhile`` is an item that an open transaction has changed: below that LSN, and not yet to be seen.
        """
        lsn, before = self._lsn, dict(self.rows)
        late = None if meanwhile is None else self._move(meanwhile)
        if late is not None:
            lsn = self._lsn
        self.log += [Change(key, "r", lsn, stock, version) for key, (stock, version) in before.items()]
        self.log += [] if late is None else [late]

    def totals(self, until: int | None = None) -> Mapping[str, int]:
        """The stock by the log; an item that is gone has none."""
        return {change.item_id: change.stock or 0 for change in self.log[:until]}

    def _move(self, item: str) -> Change:
        stock, version = self.rows[item]
        self._quantity *= 5
        return self._take(item, "u", stock + self._quantity, version + 1)

    def _set(self, key: str, op: str, stock: int, version: int) -> None:
        self.log.append(self._take(key, op, stock, version))

    def _take(self, key: str, op: str, stock: int, version: int) -> Change:
        self.rows[key] = (stock, version)
        taken = Change(key, op, self._lsn, stock, version)
        self._lsn += STEP
        return taken


def under_another_lsn(change: Change, lsn: int) -> Change:
    """A state that is told once more, as by a snapshot."""
    return replace(change, op="r", lsn=lsn)


def decoded(change: Change) -> DecodedEvent:
    """The change as the decoder returns it."""
    row = asdict(change)
    return DecodedEvent(change.event_id, tuple(row[column.name] for column in DECODER.types[CHANGE]), CHANGE)


def batch(changes: Sequence[Change], start: int = 0, dead: Sequence[DeadRecord] = ()) -> Batch:
    """A batch of one partition."""
    end = start + len(changes) + len(dead)
    rows = DECODER.rows((decoded(change), 0, offset) for offset, change in enumerate(changes, start))
    chunk = SPEC.chunking(TOPIC).of_decoded(Decoded(rows, dead))
    return Batch(TOPIC, TOPIC_ID, {0: start}, {0: end}, chunk)


@contextmanager
def open_sink(
    settings: Settings, one: Strategy = SPEC.strategy, projection: str | None = None
) -> Iterator[PostgresWriter]:
    """The sink, with the fence, until the end of the block; ``projection`` is SQL in place of its own."""
    folder = SPEC.job.projections if projection is None else projections_in(settings.home, projection)
    job = replace(SPEC.job, name=one.name, projections=folder)
    with closing(connect(settings, SinkRole.WRITER)) as connection:
        yield PostgresWriter(connection, replace(SPEC, name=one.name, job=job, strategy=one), fetch)
