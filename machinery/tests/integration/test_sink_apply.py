"""The apply against a real Postgres: one batch, one transaction; and what strategies remember of ids and versions.

The attack delivers to each strategy at random, and compares it with a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from random import Random

import hypothesis
import pytest
from hypothesis import HealthCheck, example, given
from hypothesis import strategies as st

from outbox.base.database import connect, query
from outbox.base.settings import Settings, SinkRole
from outbox.sink.applying.postgres import target
from outbox.sink.applying.postgres.target import PostgresWriter
from outbox.sink.remembering import fence, positions
from outbox.sink.remembering.strategy import Strategy
from outbox.sink.writer import Counts
from outbox_lab.stack.postgres import Postgres
from outbox_lab.testing.failures import raises
from tests.support import kept_rows
from tests.support.made_events import (
    DAY_MS,
    NOW_MS,
    PROJECTIONS,
    STRATEGIES,
    TOPIC,
    TOPIC_ID,
    Event,
    batch,
    dead_record,
    nth_key,
    sums,
    uuid7,
)
from tests.support.sink_driver import Database, open_sink, projections_in, sink_on

RANDOM = Random(3)  # noqa: S311


def events(count: int, items: int = 3) -> list[Event]:
    """Fresh events, their quantities all different so that no two mistakes cancel."""
    return [
        Event(uuid7(RANDOM), nth_key(number % items), quantity=(-1) ** number * 3**number, version=number + 1)
        for number in range(count)
    ]


def test_two_records_of_one_id_count_as_one_event(databases: Settings, database: Database) -> None:
    one, two = events(2)
    others = [replace(event, quantity=sign * 6, version=9) for event in (one, two) for sign in (1, -1)]
    assert {event.type for event in others} == {"picked", "received"}
    with open_sink(databases) as sink:
        assert sink.apply(batch([one, *others[:2]])) == Counts(3, 1, 2)
        sink.apply(batch([two], start=3))
        assert sink.apply(batch(others, start=4)) == Counts(4, 0, 4)
    assert database.totals() == sums([one, two])


def test_sinks_that_write_the_same_ids_at_once_do_not_deadlock(databases: Settings) -> None:
    """No two sinks share a row. What they share is the partitions of days that none has used before: so two of each
    strategy, one of which goes through the days in the opposite order.
    """
    some = [
        Event(uuid7(RANDOM, NOW_MS - (90 + n // 100) * DAY_MS), nth_key(n), quantity=1, version=1, total_after=1)
        for n in range(2000)
    ]

    def run(strategy: Strategy, mine: list[Event]) -> None:
        with closing(connect(databases, SinkRole.WRITER)) as connection:
            sink = sink_on(connection, strategy)
            for start in range(0, 2000, 200):
                sink.apply(batch(mine[start : start + 200], start))

    twins = [replace(strategy, name=f"{strategy.name} too") for strategy in STRATEGIES.values()]
    with ThreadPoolExecutor(2 * len(twins)) as pool:
        running = [pool.submit(run, strategy, some) for strategy in STRATEGIES.values()]
        running += [pool.submit(run, twin, some[::-1]) for twin in twins]
    for one in running:
        one.result()
    for name in [*STRATEGIES, *(twin.name for twin in twins)]:
        assert Database(databases, name).totals() == sums(some), name


class TestPositions:
    def test_events_before_the_batch_that_never_came_stop_the_sink(
        self, databases: Settings, database: Database
    ) -> None:
        some = events(4)
        with open_sink(databases) as sink:
            sink.apply(batch(some[:2]))
            with raises("events-lost", f"offsets 2 to 4 of topic {TOPIC}, partition 0"):
                sink.apply(batch(some[2:], start=5))
        assert database.totals() == sums(some[:2])
        assert database.positions() == {0: 2}

    def test_a_recreated_topic_stops_the_sink(self, databases: Settings, database: Database) -> None:
        some = events(3)
        with open_sink(databases) as sink:
            sink.apply(batch(some[:2]))
            with raises("topic-recreated"):
                sink.apply(batch(some[2:], topic_id="topic-2"))
            with raises("topic-recreated"):
                sink.positions(TOPIC, "topic-2")
        assert database.totals() == sums(some[:2])


class TestFence:
    def test_a_second_driver_is_refused_and_told_who_has_it(self, databases: Settings) -> None:
        with open_sink(databases) as first:
            with raises("sink-has-driver", "connected from 127.0.0.1"):
                open_sink(databases).__enter__()
            assert first.apply(batch(events(1))) == Counts(1, 1)

    def test_the_server_is_told_to_notice_a_dead_host(self, databases: Settings) -> None:
        # That it then does is the kernel's promise: a host that goes silent is not made here.
        with closing(connect(databases, SinkRole.WRITER)) as connection, connection.cursor() as cursor:
            sink_on(connection)
            cursor.execute("SELECT setting::int FROM pg_settings WHERE name = 'tcp_user_timeout'")
            assert cursor.fetchall() == [(fence.DEAD_HOST_S * 1000,)]

    def test_a_repair_and_a_later_driver_differ_behind_a_pooler_too(self, databases: Settings) -> None:
        def repair(sink: PostgresWriter, *, others: int) -> None:
            with kept_rows.cursor_of(databases) as cursor:
                fence.lock(cursor, sink.name)
                fence.supersede(cursor, sink.name)
                positions.start_generation(cursor, sink.name, {TOPIC: {0: 0}})
                # Behind a pooler another driver may have the session of our lock.
                cursor.execute("UPDATE sinks SET epoch = epoch + %s WHERE name = %s", [others, sink.name])

        with open_sink(databases) as sink:
            repair(sink, others=0)
            repair(sink, others=0)
            with raises("sink-superseded"):
                sink.apply(batch(events(1)))
        with open_sink(databases) as sink:
            sink.begin_generation()  # our own
            repair(sink, others=1)
            with raises("sink-fenced"):
                sink.apply(batch(events(1)))


class TestAllOrNothing:
    def test_a_projection_that_fails_leaves_no_mark(
        self, databases: Settings, database: Database, tmp_path: Path
    ) -> None:
        broken = projections_in(tmp_path, (PROJECTIONS / "stock.sql").read_text() + "\nSELECT 1 / 0;")
        some = events(2)
        with closing(connect(databases, SinkRole.WRITER)) as connection:
            sink = sink_on(connection, projections=broken)
            refused = "refused offsets {0: 0} to {0: 3}"
            with raises("database-refused", refused, f"{broken}/stock.sql: division by zero"):
                sink.apply(batch(some, dead=[dead_record(2)]))
        assert (database.totals(), database.positions(), database.dead_letters()) == ({}, {}, {})
        assert database.processed() == 0
        with open_sink(databases) as corrected:
            assert corrected.apply(batch(some)) == Counts(2, 2)

    def test_positions_that_are_refused_leave_no_mark(self, databases: Settings, database: Database) -> None:
        query(databases, SinkRole.OWNER, "ALTER TABLE positions ADD CHECK (next_offset < 2)")
        with open_sink(databases) as sink, raises("database-refused", "refused offsets"):
            sink.apply(batch(events(2)))
        assert (database.totals(), database.positions(), database.processed()) == ({}, {}, 0)


class TestTemporaryTables:
    """Autovacuum cannot advance the horizon of a session's temporary tables, and they hold the database's back."""

    USE_TRANSACTIONS = "DO $$ BEGIN FOR one IN 1..1000 LOOP PERFORM pg_current_xact_id(); COMMIT; END LOOP; END $$"
    AGE = "SELECT max(age(relfrozenxid)) FROM pg_class WHERE relpersistence = 't' AND relkind IN ('r', 't')"

    def test_a_sink_renews_them_now_and_then(
        self, databases: Settings, database: Database, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(target, "RENEWAL_S", 0)
        some, ages = events(6), list[int]()
        with open_sink(databases) as sink:
            for start in (0, 3):
                sink.apply(batch(some[start : start + 3], start))
                with closing(connect(databases, SinkRole.WRITER)) as connection:
                    connection.autocommit = True
                    connection.cursor().execute(self.USE_TRANSACTIONS)
                ages.append(int(str(database.query(self.AGE)[0][0])))
        assert ages[0] >= 1000
        assert ages[1] < 2000
        assert database.totals() == sums(some)


class TestSchema:
    def test_our_tables_are_used_whatever_the_search_path_finds_first(
        self, databases: Settings, database: Database, postgres: Postgres
    ) -> None:
        writer = databases.role_name(SinkRole.WRITER)
        names = ["sinks", "positions", "checkpoint_generations", "base_versions", "skipped_events", "dead_letters"]
        names += ["processed_events", "dedup_horizon"]
        copies = "; ".join(f"CREATE TABLE app.{name} (LIKE public.{name} INCLUDING DEFAULTS)" for name in names)
        grants = f"GRANT USAGE ON SCHEMA app TO {writer}; GRANT ALL ON ALL TABLES IN SCHEMA app TO {writer}"
        postgres.psql(f"CREATE SCHEMA app; {copies}; {grants}", databases.sink_db_url.name)
        some = events(2)
        with closing(connect(databases, SinkRole.WRITER)) as connection:
            with connection, connection.cursor() as cursor:
                cursor.execute("SET search_path = app, public")
            sink = sink_on(connection)
            sink.begin_generation()
            sink.apply(batch(some, dead=[dead_record(2)]))
        assert (database.totals(), database.positions(), len(database.dead_letters())) == (sums(some), {0: 3}, 1)
        found = {name: database.query(f"SELECT count(*) FROM app.{name}") for name in names}
        assert found == {name: [(0,)] for name in names}


# Strategy `versions` -----------------------------------------------------------------------------------------------

NAME = "versions"
LOWEST, HIGHEST = -(2**63), 2**63 - 1
# Neighbours at both bounds and around 0, so that ranges meet.
VERSIONS = [LOWEST, LOWEST + 1, -1, *range(9), HIGHEST - 2, HIGHEST - 1, HIGHEST]
Feed = Callable[..., Counts]


def numbered(version: int, quantity: int = 1, key: str = nth_key(1)) -> Event:
    """An event with an id of its own."""
    return Event(uuid7(RANDOM), key, quantity, version)


def ranges(versions: Iterable[int]) -> str:
    """Versions as Postgres writes an int8multirange."""
    found: list[list[int]] = []
    for version in sorted({*versions}):
        if found and found[-1][1] == version:
            found[-1][1] = version + 1
        else:
            found.append([version, version + 1])
    shown = ",".join(f"[{low},{'' if high > HIGHEST else high})" for low, high in found)
    return f"{{{shown}}}"


@pytest.fixture
def versions(databases: Settings) -> Database:
    return Database(databases, NAME)


@pytest.fixture
def feed(databases: Settings) -> Iterator[Feed]:
    """Delivers events to a sink, one batch after the other."""
    with open_sink(databases, NAME) as sink:
        yield lambda *events: sink.apply(batch(events, sink.positions(TOPIC, TOPIC_ID).get(0, 0)))


@hypothesis.settings(
    max_examples=40,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.lists(st.lists(st.sampled_from(VERSIONS), max_size=14), min_size=1, max_size=5))
@example([[HIGHEST], [HIGHEST - 1, HIGHEST], [LOWEST]])
@example([[1, 2, 3], [3, 4], [4]])
@example([[1, 3], [2], [1, 2, 3]])
def test_versions_are_applied_once_in_any_order(feed: Feed, versions: Database, batches: list[list[int]]) -> None:
    key, known = nth_key(RANDOM.getrandbits(60)), set[int]()
    events = {version: numbered(version, RANDOM.getrandbits(20) + 1, key) for version in VERSIONS}
    for some in batches:
        new = {*some} - known
        known |= new
        assert feed(*(events[version] for version in some)) == Counts(len(some), len(new), len(some) - len(new))
    assert versions.totals().get(key) == sums(events[version] for version in known).get(key)
    remembered = versions.query("SELECT versions::text FROM applied_versions WHERE key = %s", key)
    assert remembered == ([(ranges(known),)] if known else [])


def test_thousands_of_gaps_are_filled_in_any_order(feed: Feed, versions: Database) -> None:
    history = [numbered(version) for version in range(1, 10_001)]
    assert feed(*history[::2]) == Counts(5000, 5000)
    remembered = "SELECT versions::text FROM applied_versions"
    assert versions.query(remembered) == [(ranges(range(1, 10_001, 2)),)]
    late = RANDOM.sample(history[1::2], 5000)
    assert feed(*late[:2500]) == Counts(2500, 2500)
    assert feed(*history, *late[:2500]) == Counts(12_500, 2500, 10_000)
    assert versions.query(remembered) == [("{[1,10001)}",)]
    assert versions.totals() == sums(history)


def test_of_two_events_with_one_version_the_second_is_set_aside(feed: Feed, versions: Database) -> None:
    first, second = numbered(1, 5), numbered(1, 6)
    assert feed(first, second, numbered(2, 7), first, second) == Counts(5, 2, 2, 1)
    assert versions.dead_letters() == {second.event_id: "repeated version"}
    ((detail,),) = versions.query("SELECT detail FROM dead_letters")
    assert first.event_id in str(detail)


@pytest.mark.parametrize("at_once", [True, False])
def test_an_id_that_comes_again_with_another_version_is_another_event(
    feed: Feed, versions: Database, at_once: bool
) -> None:
    first = numbered(1, 5)
    again = replace(first, version=2, quantity=6)
    for some in [[first, again]] if at_once else [[first], [again]]:
        assert feed(*some) == Counts(len(some), len(some))
    assert feed(first, again) == Counts(2, 0, 2)
    assert versions.totals() == sums([first, again])
