"""A projection that needs the events of a key in order: what comes behind a bad one waits for it. And a batch finds the
dead letters that it needs, however many others there are.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from random import Random

import hypothesis
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from psycopg2 import extensions

from outbox.base.database import connect, query
from outbox.base.settings import Settings, SinkRole
from outbox.sink.decoding.records import Record
from outbox.sink.repair.replay import Replayed, Selection
from outbox.sink.writer import Counts
from tests.seen import ORDERED, Seen, create_tables
from tests.support.declared import TOML, Events, payload
from tests.support.declared_sinks import record
from tests.support.kept_rows import cursor_of
from tests.support.made_events import STRATEGIES, TOPIC, TOPIC_ID, Event, batch, nth_key, uuid7
from tests.support.sink_driver import Database, projections_in, sink_on

RANDOM = Random(11)  # noqa: S311
ORDER, INVOICE = "shop.order", "shop.invoice"


def order(number: int, key: str = "a") -> Record:
    return record("placed", {"id": key, "number": number})


def invoice(number: int, key: str = "a") -> Record:
    return record("sent", {"id": key, "number": number})


def id_of(one: Record) -> str:
    return (dict(one.headers)["id"] or b"").decode()


@pytest.fixture
def ordered(databases: Settings, tmp_path: Path) -> Seen:
    """A sink of two topics, whose keys are the same texts and not the same things."""
    create_tables(databases)
    events = Events(tmp_path / "events").aggregate("order", TOML, placed_v1=payload())
    known = events.aggregate("invoice", TOML, sent_v1=payload()).load()
    return Seen(databases, tmp_path, known, ["order", "invoice"], projection=ORDERED)


def applied(seen: Seen, topic: str = ORDER) -> dict[object, list[object]]:
    """By key the versions of the events of a topic, in the order in which they were applied."""
    found: dict[object, list[object]] = {}
    for of, key, number in seen.events("topic", "id", "number"):
        if of == topic:
            found.setdefault(key, []).append(number)
    return found


def test_later_events_of_the_key_wait_and_others_go_on(ordered: Seen) -> None:
    bad = order(2)
    ordered.refuse(id_of(bad))
    some = [order(1), order(1, "b"), bad, order(3), order(2, "b")]
    assert ordered.apply(ORDER, *some) == Counts(rows=5, applied=3, rejected=2)
    assert ordered.apply(INVOICE, invoice(1), invoice(3)) == Counts(rows=2, applied=2), "of that topic nothing is bad"
    assert ordered.apply(ORDER, order(4), order(3, "b")) == Counts(rows=2, applied=1, rejected=1)
    assert ordered.letters("reason") == [("unwelcome",), ("parked",), ("parked",)]
    assert ordered.replay(reason="unwelcome") == Replayed(rejected=3), "the cause is still there"
    assert ordered.replay(reason="parked") == Replayed(rejected=2), "the one before them still waits"
    ordered.refuse()
    assert ordered.replay() == Replayed(applied=3)
    assert applied(ordered) == {"a": [1, 2, 3, 4], "b": [1, 2, 3]}


def test_an_unreadable_record_blocks_its_key_on_its_topic_only(ordered: Seen) -> None:
    assert ordered.apply(INVOICE, invoice(1)._replace(value=b"{"), invoice(2)) == Counts(rows=1, rejected=1, dead=1)
    assert ordered.apply(ORDER, order(1), order(2)) == Counts(rows=2, applied=2)
    assert ordered.letters("topic", "reason") == [(INVOICE, "not JSON"), (INVOICE, "parked")]


def test_when_the_bad_one_is_given_up_they_follow_on_demand(ordered: Seen) -> None:
    bad = order(1)
    ordered.refuse(id_of(bad))
    ordered.apply(ORDER, bad, order(2), order(3))
    assert Database(ordered.settings, ordered.spec.name).discard(Selection(reason="unwelcome")) == 1
    ordered.apply(ORDER, order(4))
    assert applied(ordered) == {}, "those that wait are before it"
    assert ordered.replay() == Replayed(applied=3)
    assert applied(ordered) == {"a": [2, 3, 4]}


# As docs/projections.md has it: the version of each key is stored, and an event that is not above it is refused.
LATE = """
-- ordered
-- [refuse]
INSERT INTO rejections (event_id, reason, detail)
SELECT new.event_id, 'late', format('version %%s after %%s', new.number, stored.number)
  FROM new_events AS new
  JOIN latest AS stored ON stored.sink = %(sink)s AND stored.id = new.id
 WHERE new.number <= stored.number;
-- [apply]
INSERT INTO latest AS stored (sink, id, number)
SELECT %(sink)s, id, max(number) FROM new_events GROUP BY id ORDER BY id
ON CONFLICT (sink, id) DO UPDATE SET number = excluded.number;
"""
LATEST = """
CREATE TABLE latest (sink text, id text, number bigint, PRIMARY KEY (sink, id));
GRANT SELECT, INSERT, UPDATE ON latest TO {writer};
"""


def test_a_late_event_is_refused_by_the_version_that_is_stored(ordered: Seen, tmp_path: Path) -> None:
    ordered.query(LATEST.replace("{writer}", ordered.settings.role_name(SinkRole.WRITER)))
    seen = Seen(ordered.settings, tmp_path, ordered.known, ["order"], projection=LATE)
    one = [order(number) for number in range(1, 6)]
    within = [one[1], one[0], order(1, "b")]
    assert seen.apply(ORDER, *within).applied == 3, "within a batch the order does not matter"
    assert seen.apply(ORDER, one[3]).applied == 1
    assert seen.apply(ORDER, one[2], one[4], order(2, "b")) == Counts(rows=3, applied=1, rejected=2)
    assert seen.apply(ORDER, one[0], one[3]) == Counts(rows=2, duplicates=2)
    assert seen.query("SELECT number FROM latest ORDER BY id") == [(4,), (2,)]
    assert seen.letters("identity", "reason") == [(id_of(one[2]), "late"), (id_of(one[4]), "parked")]


EVENTS = [order(number // 2 + 1, "ab"[number % 2]) for number in range(12)]
numbers = st.integers(0, len(EVENTS) - 1)


@given(st.lists(st.lists(numbers, max_size=8), max_size=5), st.sets(numbers, max_size=2), st.sets(numbers, max_size=2))
@hypothesis.settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_events_are_applied_in_order_and_completely_however_they_come(
    ordered: Seen, again: list[list[int]], refused: set[int], unreadable: set[int]
) -> None:
    """Each event comes first in the order of its key, as the relay keeps it; then all may come again, in any order."""
    for table in ("seen", "dead_letters", "processed_events", "positions"):
        ordered.query(f"DELETE FROM {table}")
    ordered.next_offsets = {}
    ordered.refuse(*(id_of(EVENTS[number]) for number in refused - unreadable))
    for some in [range(4), range(4, 7), range(7, len(EVENTS)), *again]:
        came = (EVENTS[one]._replace(value=b"{") if one in unreadable else EVENTS[one] for one in some)
        ordered.apply(ORDER, *came)
    ordered.refuse()
    for number in unreadable:
        correct = "UPDATE dead_letters SET value = %s WHERE identity = %s"
        ordered.query(correct, EVENTS[number].value, id_of(EVENTS[number]))
    ordered.replay()
    assert applied(ordered) == {"a": [1, 2, 3, 4, 5, 6], "b": [1, 2, 3, 4, 5, 6]}
    assert ordered.query("SELECT FROM dead_letters WHERE status = 'open'") == []


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
