"""A projection that needs the events of a key in order: what comes behind a bad one waits for it. And a batch finds the
dead letters that it needs, however many others there are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from random import Random

import hypothesis
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from psycopg2 import extensions

from outbox.base.database import connect, query
from outbox.base.settings import Settings, SinkRole
from outbox.sink.applying.postgres.target import PostgresWriter
from outbox.sink.repair.replay import Replayed, Selection
from outbox.sink.writer import Counts
from tests.seen import ORDERED, create_tables
from tests.support.kept_rows import cursor_of
from tests.support.made_events import STRATEGIES, TOPIC, TOPIC_ID, Event, batch, nth_key, uuid7
from tests.support.record_corpus import unread
from tests.support.sink_driver import Database, projections_in, replayed, sink_on, spec_with

RANDOM = Random(11)  # noqa: S311
EVENTS = [Event(uuid7(RANDOM), nth_key(number % 2), 1, number // 2 + 1) for number in range(12)]


@dataclass
class Ordered:
    """A sink whose projection needs order, and what an operator does to it."""

    settings: Settings
    projections: Path
    sink: PostgresWriter

    def refuse(self, *events: Event) -> None:
        """The events that the projection refuses from now on."""
        query(self.settings, SinkRole.WRITER, "DELETE FROM unwelcome")
        add = "INSERT INTO unwelcome SELECT unnest(%s::uuid[])"
        query(self.settings, SinkRole.WRITER, add, [[event.event_id for event in events]])

    def replay(self, **filters: str) -> Replayed:
        """Replay letters, as the command does."""
        spec = spec_with(projections=self.projections)
        return replayed(self.settings, spec, Selection(**filters))  # type: ignore[arg-type]

    def versions(self) -> dict[str, list[int]]:
        """By item the versions of its events, in the order in which they were applied."""
        found: dict[str, list[int]] = {}
        applied = "SELECT event ->> 'item_id', (event ->> 'version')::bigint FROM seen ORDER BY line"
        for key, version in query(self.settings, SinkRole.OWNER, applied):
            found.setdefault(key, []).append(version)
        return found

    def reasons(self) -> list[str]:
        """Why events are set aside."""
        letters = "SELECT reason FROM dead_letters WHERE status = 'open' ORDER BY \"offset\""
        return [reason for (reason,) in query(self.settings, SinkRole.WRITER, letters)]


@pytest.fixture
def ordered(databases: Settings, tmp_path: Path) -> Iterator[Ordered]:
    create_tables(databases)
    projections = projections_in(tmp_path, ORDERED, "seen")
    with closing(connect(databases, SinkRole.WRITER)) as connection:
        yield Ordered(databases, projections, sink_on(connection, projections=projections))


def of_key(number: int) -> list[Event]:
    return [event for event in EVENTS if event.key == nth_key(number)]


def test_later_events_of_the_key_wait_and_others_go_on(ordered: Ordered) -> None:
    one, other = of_key(0), of_key(1)
    ordered.refuse(one[1])
    counts = ordered.sink.apply(batch([one[0], other[0], one[1], one[2], other[1]]))
    assert counts == Counts(rows=5, applied=3, rejected=2)
    ordered.sink.apply(batch([one[3], other[2]], start=5))
    assert ordered.versions() == {nth_key(0): [1], nth_key(1): [1, 2, 3]}
    assert ordered.reasons() == ["unwelcome", "parked", "parked"]
    assert ordered.replay(reason="unwelcome") == Replayed(rejected=3), "the cause is still there"
    assert ordered.replay(reason="parked") == Replayed(rejected=2), "the one before them still waits"


def test_when_the_bad_one_is_given_up_they_follow_on_demand(ordered: Ordered) -> None:
    one = of_key(0)
    ordered.refuse(one[0])
    ordered.sink.apply(batch(one[:3]))
    assert Database(ordered.settings).discard(Selection(reason="unwelcome")) == 1
    ordered.sink.apply(batch(one[3:4], start=3))
    assert ordered.versions() == {}, "those that wait are before it"
    assert ordered.replay() == Replayed(applied=3)
    assert ordered.versions() == {nth_key(0): [2, 3, 4]}


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


numbers = st.integers(0, len(EVENTS) - 1)


@given(st.lists(st.lists(numbers, max_size=8), max_size=5), st.sets(numbers, max_size=2), st.sets(numbers, max_size=2))
@hypothesis.settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_events_are_applied_in_order_and_completely_however_they_come(
    ordered: Ordered, again: list[list[int]], refused: set[int], unreadable: set[int]
) -> None:
    """Each event comes first in the order of its key, as the relay keeps it; then all may come again, in any order."""
    for table in ("seen", "dead_letters", "processed_events", "positions"):
        query(ordered.settings, SinkRole.OWNER, f"DELETE FROM {table}")
    ordered.refuse(*(EVENTS[number] for number in refused - unreadable))
    offset = 0
    for some in [range(4), range(4, 7), range(7, len(EVENTS)), *again]:
        dead = [unread(EVENTS[one], place) for place, one in enumerate(some, offset) if one in unreadable]
        read = {place: EVENTS[one] for place, one in enumerate(some, offset) if one not in unreadable}
        end = offset + len(some)
        ordered.sink.apply(batch([*read.values()], offset, end, dead=dead, offsets=[*read]))
        offset = end
    ordered.refuse()
    ordered.replay()
    assert ordered.versions() == {nth_key(number): [event.version for event in of_key(number)] for number in (0, 1)}
    assert ordered.reasons() == []


class TestManyLetters:
    """Letters come by the thousand in one transaction. Until autovacuum has counted them, statistics are those of
    before.
    """

    LETTERS = 100_000
    # In turn: an open one of an event, one of a record that was invalid, a resolved one, and a discarded one.
    FILL = """
    INSERT INTO dead_letters (sink, identity, topic, topic_id, partition, "offset", key, is_event, version, value,
                              event_id, status, reason, detail)
    SELECT %(sink)s, id, %(topic)s, %(topic_id)s, 0, number, convert_to('key-' || number, 'UTF8'),
           number %% 4 <> 1, number, 'bad', id,
           (ARRAY['open', 'open', 'replayed', 'discarded'])[number %% 4 + 1], 'unwelcome', 'as yet'
      FROM (SELECT number, uuidv7() AS id FROM generate_series(%(first)s::int, %(last)s::int) AS number) AS numbers
    """
    LETTER = """
    INSERT INTO dead_letters (sink, identity, topic, topic_id, partition, "offset", is_event, event_id, status, reason,
                              detail)
    VALUES (%(sink)s, %(id)s, %(topic)s, %(topic_id)s, 1, 0, true, %(id)s, %(status)s, 'unwelcome', 'as yet')
    """
    BUFFERS = """
    SELECT heap_blks_read + heap_blks_hit + idx_blks_read + idx_blks_hit FROM pg_statio_user_tables
     WHERE relname = 'dead_letters'
    """

    def buffers(self, connection: extensions.connection, settings: Settings) -> int:
        """How many buffers of dead_letters were read until now."""
        with connection, connection.cursor() as cursor:
            cursor.execute("SELECT pg_stat_force_next_flush()")
        [(count,)] = query(settings, SinkRole.WRITER, self.BUFFERS)
        return int(count)

    @pytest.mark.parametrize(("analyzed", "count"), [(0, 100), (10, 1), (LETTERS, 1), (LETTERS, 100)])
    @pytest.mark.parametrize("by", ["dedup", "offsets"])
    def test_letters_of_others_are_not_read_whatever_statistics_say(
        self, databases: Settings, tmp_path: Path, by: str, analyzed: int, count: int
    ) -> None:
        create_tables(databases)
        some = [Event(uuid7(RANDOM), nth_key(number + 1), 1, 1) for number in range(count)]
        first, late, discarded, replayed = (
            Event(uuid7(RANDOM), nth_key(key), 1, version) for key, version in [(0, 1), (0, 2), (3001, 1), (3002, 1)]
        )
        names = {"sink": by, "topic": TOPIC, "topic_id": TOPIC_ID}
        with cursor_of(databases, SinkRole.OWNER) as cursor:
            cursor.execute("ALTER TABLE dead_letters SET (autovacuum_enabled = off)")
            cursor.execute(self.FILL, {**names, "first": 1, "last": analyzed})
            cursor.execute("ANALYZE dead_letters")
            cursor.execute(self.FILL, {**names, "first": analyzed + 1, "last": self.LETTERS})
            cursor.execute("INSERT INTO unwelcome VALUES (%s)", [first.event_id])
            for event, status in ((discarded, "discarded"), (replayed, "replayed")):
                cursor.execute(self.LETTER, {**names, "id": event.event_id, "status": status})
        with closing(connect(databases, SinkRole.WRITER)) as connection:
            sink = sink_on(connection, STRATEGIES[by], projections_in(tmp_path, ORDERED, "seen"))
            assert sink.apply(batch([first])) == Counts(rows=1, rejected=1)
            before = self.buffers(connection, databases)
            counts = sink.apply(batch([*some, late, discarded, replayed], start=1))
            read = self.buffers(connection, databases) - before
        assert counts == Counts(rows=count + 3, applied=count, duplicates=2, rejected=1)
        assert read < 21 * count + 150
