"""A projection that needs the events of a key in order: what comes behind a bad one waits for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random

import hypothesis
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from outbox.base.database import connect, query
from outbox.base.settings import Settings, SinkRole
from outbox.sink.applying.postgres.target import PostgresWriter
from outbox.sink.repair.replay import Replayed, Selection
from outbox.sink.writer import Counts
from tests.support.made_events import STRATEGIES, Event, batch, nth_key, uuid7
from tests.support.record_corpus import unread
from tests.support.sink_driver import Database, projections_in, replayed, sink_on, spec_with

ORDERED = "-- ordered\n"
# Each event is a line of its item's statement; which may not be told before the one that it follows.
STATEMENT = """
-- [refuse]
INSERT INTO rejections
SELECT event_id, 'unwelcome', 'as yet' FROM new_events WHERE event_id IN (SELECT event_id FROM unwelcome);
-- [apply]
INSERT INTO statement (sink, item_id, version)
SELECT %(sink)s, item_id, version FROM new_events ORDER BY item_id, version;
"""
TABLES = """
CREATE TABLE statement (line bigserial, sink text, item_id uuid, version bigint);
CREATE TABLE unwelcome (event_id uuid);
GRANT SELECT, INSERT, DELETE ON statement, unwelcome TO {writer};
GRANT USAGE ON SEQUENCE statement_line_seq TO {writer};
"""
RANDOM = Random(11)  # noqa: S311
EVENTS = [Event(uuid7(RANDOM), nth_key(number % 2), 1, number // 2 + 1) for number in range(12)]
SURVIVES = ("dedup", "merge")


@dataclass
class Statement:
    """A sink whose projection needs order, and what an operator does to it."""

    settings: Settings
    projections: Path
    name: str
    sink: PostgresWriter

    def set(self, *, unwelcome: Sequence[Event]) -> None:
        """Which events the projection refuses."""
        self._change("DELETE FROM unwelcome")
        for event in unwelcome:
            self._change("INSERT INTO unwelcome VALUES (%s)", event.event_id)

    def replay(self, **filters: str) -> Replayed:
        """Replay letters, as the command does."""
        spec = spec_with(STRATEGIES[self.name], self.projections)
        return replayed(self.settings, spec, Selection(**filters))  # type: ignore[arg-type]

    def lines(self) -> dict[str, list[int]]:
        """By item the versions on its statement, in the order they were written in."""
        found: dict[str, list[int]] = {}
        query = "SELECT item_id, version FROM statement WHERE sink = %s ORDER BY line"
        for key, version in Database(self.settings).query(query, self.name):
            found.setdefault(str(key), []).append(int(str(version)))
        return found

    def reasons(self) -> list[str]:
        """Why events are set aside."""
        query = "SELECT reason FROM dead_letters WHERE sink = %s AND status = 'open' ORDER BY \"offset\""
        return [str(reason) for (reason,) in Database(self.settings).query(query, self.name)]

    def forget(self) -> None:
        """As if nothing had been."""
        for table in ("statement", "unwelcome", "dead_letters", "processed_events", "landed_events", "positions"):
            query(self.settings, SinkRole.OWNER, f"DELETE FROM {table}")

    def _change(self, statement: str, *parameters: str) -> None:
        query(self.settings, SinkRole.WRITER, statement, parameters or None)


@pytest.fixture(params=SURVIVES)
def statement(databases: Settings, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Statement]:
    query(databases, SinkRole.OWNER, TABLES.replace("{writer}", databases.role_name(SinkRole.WRITER)))
    projections = projections_in(tmp_path, ORDERED + STATEMENT, "statement")
    with closing(connect(databases, SinkRole.WRITER)) as connection:
        sink = sink_on(connection, STRATEGIES[request.param], projections)
        yield Statement(databases, projections, request.param, sink)


def of_key(number: int) -> list[Event]:
    return [event for event in EVENTS if event.key == nth_key(number)]


def test_later_events_of_the_key_wait_and_others_go_on(statement: Statement) -> None:
    one, other = of_key(0), of_key(1)
    statement.set(unwelcome=[one[1]])
    counts = statement.sink.apply(batch([one[0], other[0], one[1], one[2], other[1]]))
    assert counts == Counts(rows=5, applied=3, rejected=2)
    statement.sink.apply(batch([one[3], other[2]], start=5))
    assert statement.lines() == {nth_key(0): [1], nth_key(1): [1, 2, 3]}
    assert statement.reasons() == ["unwelcome", "parked", "parked"]


def test_they_are_replayed_behind_it(statement: Statement) -> None:
    one = of_key(0)
    statement.set(unwelcome=[one[1]])
    statement.sink.apply(batch(one[:4]))
    assert statement.replay(reason="unwelcome") == Replayed(rejected=3), "the cause is still there"
    assert statement.replay(reason="parked") == Replayed(rejected=2), "the one before them still waits"
    statement.set(unwelcome=[])
    assert statement.replay(reason="unwelcome") == Replayed(applied=3)
    statement.sink.apply(batch(one[4:], start=4))
    assert statement.lines() == {nth_key(0): [1, 2, 3, 4, 5, 6]}
    assert statement.reasons() == []


def test_when_the_bad_one_is_given_up_they_follow_on_demand(statement: Statement) -> None:
    one = of_key(0)
    statement.set(unwelcome=[one[0]])
    statement.sink.apply(batch(one[:3]))
    assert Database(statement.settings, statement.name).discard(Selection(reason="unwelcome")) == 1
    statement.sink.apply(batch(one[3:4], start=3))
    assert statement.lines() == {}, "those that wait are before it"
    assert statement.replay() == Replayed(applied=3)
    assert statement.lines() == {nth_key(0): [2, 3, 4]}


# As docs/projections.md has it: the version of each item is stored, and an event that is not above it is refused.
LATE = """
-- ordered
-- [refuse]
INSERT INTO rejections (event_id, reason, detail)
SELECT new.event_id, 'late', format('version %%s after %%s', new.version, stored.version)
  FROM new_events AS new
  JOIN latest AS stored ON stored.sink = %(sink)s AND stored.item_id = new.item_id
 WHERE new.version <= stored.version;
-- [apply]
INSERT INTO latest AS stored (sink, item_id, version)
SELECT %(sink)s, item_id, max(version) FROM new_events GROUP BY item_id ORDER BY item_id
ON CONFLICT (sink, item_id) DO UPDATE SET version = excluded.version;
"""
LATEST = """
CREATE TABLE latest (sink text, item_id uuid, version bigint, PRIMARY KEY (sink, item_id));
GRANT SELECT, INSERT, UPDATE ON latest TO {writer};
"""


def test_a_late_event_is_refused_by_the_version_that_is_stored(databases: Settings, tmp_path: Path) -> None:
    query(databases, SinkRole.OWNER, LATEST.replace("{writer}", databases.role_name(SinkRole.WRITER)))
    one, other = of_key(0), of_key(1)
    with closing(connect(databases, SinkRole.WRITER)) as connection:
        sink = sink_on(connection, projections=projections_in(tmp_path, LATE, "latest"))
        assert sink.apply(batch([one[1], one[0], other[0]])).applied == 3, "within a batch the order does not matter"
        assert sink.apply(batch([one[3]], start=3)).applied == 1
        late = [one[2], one[4], other[1]]
        assert sink.apply(batch(late, start=4)) == Counts(rows=3, applied=1, rejected=2)
        assert sink.apply(batch([one[0], one[3]], start=7)) == Counts(rows=2, duplicates=2)
    database = Database(databases)
    assert database.query("SELECT version FROM latest ORDER BY item_id") == [(4,), (2,)]
    assert database.dead_letters() == {one[2].event_id: "late", one[4].event_id: "parked"}


deliveries = st.lists(st.lists(st.integers(0, len(EVENTS) - 1), max_size=8), max_size=5)


@given(again=deliveries, bad=st.sets(st.integers(0, len(EVENTS) - 1), max_size=4), seed=st.integers(0, 2**32))
@hypothesis.settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_statements_are_in_order_and_complete_however_events_come(
    statement: Statement, again: list[list[int]], bad: set[int], seed: int
) -> None:
    """Each event comes first in the order of its key, as the relay keeps it; then all may come again, in any order."""
    statement.forget()
    random = Random(seed)  # noqa: S311
    statement.set(unwelcome=[EVENTS[number] for number in bad if random.random() < 0.5])
    refused = {event_id for (event_id,) in Database(statement.settings).query("SELECT event_id::text FROM unwelcome")}
    unreadable = {EVENTS[number].event_id for number in bad} - refused
    offset = 0
    for some in [EVENTS[:4], EVENTS[4:7], EVENTS[7:], *[[EVENTS[number] for number in one] for one in again]]:
        read = [event for event in some if event.event_id not in unreadable]
        dead = [unread(event, offset + place) for place, event in enumerate(some) if event.event_id in unreadable]
        places = [offset + place for place, event in enumerate(some) if event.event_id not in unreadable]
        statement.sink.apply(batch(read, offset, offset + len(some), dead=dead, offsets=places))
        assert all(one < next_one for lines in statement.lines().values() for one, next_one in pairwise(lines))
        offset += len(some)
    statement.set(unwelcome=[])
    statement.replay()
    assert statement.lines() == {nth_key(number): [event.version for event in of_key(number)] for number in (0, 1)}
    assert statement.reasons() == []
