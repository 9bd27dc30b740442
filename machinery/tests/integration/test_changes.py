"""The strategy `changes`: rows of a log, however they are delivered."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import hypothesis
import pytest
from hypothesis import HealthCheck, example, given
from hypothesis import strategies as st

from outbox.base.settings import Settings, SinkRole, load
from outbox.relay import connectors, slot
from outbox.sink import discovery
from outbox.sink.decoding.batch import Batch
from outbox.sink.decoding.records import Record
from outbox.sink.writer import SinkWriter
from outbox_lab.testing.failures import raises
from outbox_lab.testing.helpers import query
from stock.sinks.changes.records import TABLE
from tests.support.declared_sinks import batch_of
from tests.support.made_events import NOW_MS, TOPIC_ID, nth_key
from tests.support.sink_driver import Database, driving

NAME = "changes"
SPEC = discovery.sinks(load(environment=False))[NAME]
[TOPIC] = SPEC.topics
STEP = 8  # records of the log begin at multiples of it


@dataclass(frozen=True)
class Change:
    """A change of a row; of a deletion the state is not told."""

    item_id: str
    op: str
    lsn: int
    stock: int | None = None
    version: int | None = None

    @property
    def record(self) -> Record:
        """The record as Debezium writes it; of a deletion it makes up what the log does not have."""
        state = {"id": self.item_id, "unit": "KGM", "stock": self.stock, "version": self.version}
        made_up = {"id": self.item_id, "unit": "", "stock": 0, "version": 0}
        envelope = {
            "before": made_up if self.op == "d" else None,
            "after": None if self.op == "d" else state,
            "source": {"schema": "public", "table": TABLE, "lsn": self.lsn, "snapshot": "false"},
            "op": self.op,
        }
        return Record(json.dumps({"id": self.item_id}).encode(), [], json.dumps(envelope).encode(), NOW_MS)


class Items:
    """A table of items and its log. Quantities are such that no two mistakes cancel.

    ``first`` is before the number of its first item: two tables share none.
    """

    def __init__(self, first: int = 0) -> None:
        self.log: list[Change] = []
        self.rows: dict[str, int] = {}  # stock
        self._first = first
        self._quantity = 1

    @property
    def end(self) -> int:
        """The LSN at which the next change begins."""
        return 1000 + (self._first << 8) + STEP * sum(change.op in "cu" for change in self.log)

    def put(self, number: int) -> str:
        """Insert an item, or change its stock. A key that another row takes over goes on above its last version: that
        is the projection's limit.
        """
        key = nth_key(self._first + number)
        versions = [change.version for change in self.log if change.item_id == key and change.version is not None]
        self._quantity *= 5
        stock = self.rows.get(key, 0) + self._quantity
        self.log.append(Change(key, "u" if key in self.rows else "c", self.end, stock, max(versions, default=-1) + 1))
        self.rows[key] = stock
        return key

    def rename(self, number: int, other: int) -> None:
        """Change a primary key, which is a deletion and an insert at one LSN."""
        old, new = nth_key(self._first + number), nth_key(self._first + other)
        if old in self.rows and new not in self.rows:
            self.log.append(Change(old, "d", self.end))
            del self.rows[old]
            self.put(other)

    def snapshot(self, meanwhile: int | None = None) -> None:
        """Send every row again, with the LSN at which the next change will begin.

        ``meanwhile`` is an item that an open transaction has changed: below that LSN, and not yet to be seen.
        """
        before, place = self.states(), len(self.log)
        if meanwhile is not None:
            self.put(meanwhile)
        self.log[place:place] = [replace(before[key], op="r", lsn=self.end) for key in before]

    def capture(self) -> None:
        """Let the log begin here, with a snapshot."""
        before = self.states()
        self.log.clear()
        self.log += [replace(state, op="r", lsn=self.end) for state in before.values()]

    def states(self) -> Mapping[str, Change]:
        """The last change of each row."""
        return {change.item_id: change for change in self.log if change.item_id in self.rows and change.op != "d"}

    def totals(self, until: int | None = None) -> Mapping[str, int]:
        """The stock by the log; an item that is gone has none."""
        return {change.item_id: change.stock or 0 for change in self.log[:until]}


def batch(changes: Sequence[Change], start: int = 0) -> Batch:
    """A batch of one partition."""
    return batch_of(SPEC, TOPIC, *(change.record for change in changes), start=start)


@pytest.fixture
def database(databases: Settings) -> Database:
    return Database(databases, NAME)


# However they are delivered ---------------------------------------------------------------------------------------

numbers = st.integers(1, 6)
puts = st.tuples(st.just("put"), numbers)
others = [
    st.tuples(st.just("rename"), numbers, numbers),
    st.tuples(st.just("snapshot"), st.none() | numbers),
    st.tuples(st.just("capture")),
]
acts = st.lists(st.one_of(puts, puts, *others), max_size=24)
Step = tuple[int, int, int, int, bool]
steps = st.tuples(st.integers(0, 8), st.integers(0, 8), st.integers(0, 2), st.integers(0, 3), st.booleans())


class Delivery:
    """Puts a log onto a topic, never a key's changes in another order, and lets a sink read it.

    What may come beside: changes sent again in their order (under their LSN, at other offsets), twice in one batch;
    older states under another LSN, at any place; and the same offsets read again.
    """

    def __init__(self, sink: SinkWriter, items: Items, random: Random) -> None:
        self._sink = sink
        self._log = items.log
        self._random = random
        self._position = sink.positions(TOPIC, TOPIC_ID).get(0, 0)
        self.sent = 0

    def next(self, count: int, back: int, twice: int, late: int, again: bool) -> None:
        """Deliver the next changes of the log with so many of each of these."""
        old, new = self._log[max(0, self.sent - back) : self.sent], self._log[self.sent : self.sent + count]
        changes = [*old, *new, *new[-twice:]] if twice else [*old, *new]
        known = [change for change in self._log[: self.sent] if change.op != "d"]
        for state in self._random.choices(known, k=late) if known else []:
            place = self._random.randint(0, len(changes))
            changes.insert(place, replace(state, op="r", lsn=self._random.getrandbits(40)))
        for _ in range(2 if again else 1):
            self._sink.apply(batch(changes, self._position))
        self._position += len(changes)
        self.sent += len(new)


@pytest.fixture
def sink(databases: Settings) -> Iterator[SinkWriter]:
    with driving(databases, SPEC) as opened:
        yield opened


@hypothesis.settings(
    max_examples=80, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(acts, st.lists(steps, max_size=6), st.integers(0, 2**32))
@example([("put", 1), ("put", 2), ("capture",), ("put", 1), ("put", 1)], [(9, 0, 0, 0, False)], 0)
@example([("put", 1), ("rename", 1, 2), ("rename", 2, 1), ("put", 1)], [(6, 0, 0, 0, False), (0, 6, 0, 0, False)], 0)
def test_the_totals_are_those_of_the_log_however_it_is_delivered(
    sink: SinkWriter, database: Database, history: list[tuple[Any, ...]], batches: list[Step], seed: int
) -> None:
    items = Items(sink.positions(TOPIC, TOPIC_ID).get(0, 0) << 8)  # each example has items of its own
    for name, *which in history:
        getattr(items, name)(*which)
    delivery = Delivery(sink, items, Random(seed))  # noqa: S311
    for each in [*batches, (len(items.log), 3, 1, 3, True)]:
        delivery.next(*each)
        ours, found = items.totals(delivery.sent), database.totals()
        assert {key: found.get(key) for key in ours} == ours


def test_a_change_at_a_position_of_another_log_is_applied_once_the_memory_is_deleted(
    databases: Settings, database: Database
) -> None:
    """As after a restore of a dump: the log begins anew, and may have a change where the old one had another."""
    items = Items()
    one, *_ = (items.put(1) for _ in range(2))
    newer = replace(items.log[-1], stock=99, version=9)
    with driving(databases, SPEC) as sink:
        sink.apply(batch(items.log))
        sink.apply(batch([newer], 2))
        assert database.totals() == items.totals(), "it was skipped as known"
        query(databases, f"DELETE FROM processed_changes WHERE sink = '{NAME}'", SinkRole.OWNER)
        sink.apply(batch([newer, *items.log], 3))  # older states that are read again change nothing
        assert database.totals() == {one: 99}


@pytest.mark.parametrize("let", ["insert, update", "insert, delete", "update, delete"])
def test_a_publication_that_does_not_let_every_change_pass_is_refused(databases: Settings, let: str) -> None:
    changes = connectors.load(databases, NAME)
    query(databases, f"CREATE PUBLICATION {changes.publication} FOR TABLE items WITH (publish = '{let}')")
    slot.publish(databases, changes)
    with raises("publication-wrong", "does not publish"):
        slot.require_whole_table(databases, changes)
