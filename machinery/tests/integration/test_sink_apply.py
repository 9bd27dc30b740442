"""The apply against a real Postgres: one batch, one transaction, whatever is delivered."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from random import Random

import psycopg2
import pytest

from outbox.base.database import connect, query
from outbox.base.settings import Settings, SinkRole
from outbox.base.wait import wait_for
from outbox.sink.applying.postgres import target
from outbox.sink.applying.postgres.target import PostgresWriter
from outbox.sink.decoding.batch import Returned
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
    Event,
    batch,
    dead_record,
    fetch,
    nth_key,
    sums,
    uuid7,
)
from tests.support.sink_driver import Database, open_sink, projections_in, sink_on, spec_with

RANDOM = Random(3)  # noqa: S311


def events(count: int, items: int = 3) -> list[Event]:
    """Fresh events, their quantities all different so that no two mistakes cancel."""
    return [
        Event(uuid7(RANDOM), nth_key(number % items), quantity=(-1) ** number * 3**number, version=number + 1)
        for number in range(count)
    ]


class TestDedup:
    def test_skips_duplicates_inside_a_batch(self, databases: Settings, database: Database) -> None:
        some = events(3)
        with open_sink(databases) as sink:
            assert sink.apply(batch([some[0], some[1], some[0], some[2], some[0]])) == Counts(5, 3, 2)
        assert database.totals() == sums(some)

    def test_skips_duplicates_of_earlier_batches_and_drivers(self, databases: Settings, database: Database) -> None:
        some = events(4)
        with open_sink(databases) as sink:
            sink.apply(batch(some[:3]))
            assert sink.apply(batch(some[1:], start=3)) == Counts(3, 1, 2)
        with open_sink(databases) as sink:
            assert sink.apply(batch(some, start=6)) == Counts(4, 0, 4)
        assert database.totals() == sums(some)

    def test_two_records_of_one_id_count_as_one_event(self, databases: Settings, database: Database) -> None:
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

    def test_a_re_read_does_not_move_them_back(self, databases: Settings, database: Database) -> None:
        some = events(4)
        with open_sink(databases) as sink:
            sink.apply(batch(some))
            sink.apply(batch(some[:1]))
        assert database.positions() == {0: 4}


class TestFence:
    def test_a_second_driver_is_refused_and_told_who_has_it(self, databases: Settings) -> None:
        with open_sink(databases) as first:
            with raises("sink-has-driver", "connected from 127.0.0.1"):
                open_sink(databases).__enter__()
            assert first.apply(batch(events(1))) == Counts(1, 1)

    def test_the_fence_falls_with_the_connection(self, databases: Settings, database: Database) -> None:
        some = events(2)
        with closing(connect(databases, SinkRole.WRITER)) as connection:
            lost = sink_on(connection)
            pid = connection.info.backend_pid
            database.query("SELECT pg_terminate_backend(%s)", pid)
            lives = "SELECT FROM pg_stat_activity WHERE pid = %s"
            wait_for("the backend to end", lambda: not database.query(lives, pid), timeout_s=5)
            with open_sink(databases) as taken_over:
                assert taken_over.apply(batch(some)) == Counts(2, 2)
                with raises("database-connection-lost"):
                    lost.apply(batch(some))
        assert database.totals() == sums(some)

    def test_the_server_is_told_to_notice_a_dead_host(self, databases: Settings) -> None:
        # That it then does is the kernel's promise: a host that goes silent is not made here.
        with closing(connect(databases, SinkRole.WRITER)) as connection, connection.cursor() as cursor:
            sink_on(connection)
            cursor.execute("SELECT setting::int FROM pg_settings WHERE name = 'tcp_user_timeout'")
            assert cursor.fetchall() == [(fence.DEAD_HOST_S * 1000,)]

    def test_a_superseded_driver_changes_nothing(self, databases: Settings, database: Database) -> None:
        """Behind a pooler the session lock may have gone elsewhere: the epoch tells."""
        with open_sink(databases) as sink:
            query(databases, SinkRole.WRITER, "UPDATE sinks SET epoch = epoch + 1 WHERE name = 'dedup'")
            with raises("sink-fenced"):
                sink.apply(batch(events(1)))
        assert database.totals() == {}

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


class TestDeadLetters:
    def test_an_event_in_another_unit_is_set_aside(self, databases: Settings, database: Database) -> None:
        kilos, litres, later = events(3, items=1)
        litres = Event(litres.event_id, litres.key, litres.quantity, litres.version, unit="LTR")
        with open_sink(databases) as sink:
            # The item's first event decides, in whatever order they come.
            assert sink.apply(batch([litres, kilos])) == Counts(rows=2, applied=1, rejected=1)
            assert sink.apply(batch([later, litres], start=2)) == Counts(2, 1, 1)
        assert database.totals() == sums([kilos, later])
        assert database.dead_letters() == {litres.event_id: "unit mismatch"}
        ((kept, is_event),) = database.query("SELECT value, is_event FROM dead_letters")
        assert (bytes(kept), is_event) == (litres.record.value, True)  # type: ignore[call-overload]


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


def test_what_a_transform_leaves_out_is_filtered(databases: Settings, database: Database) -> None:
    some, plain = events(2), spec_with()
    made = batch([*some, some[0]])
    rows = made.chunk.frame
    kept = rows.filter([offset != 1 for offset in rows["offset"].to_pylist()])
    with closing(connect(databases, SinkRole.WRITER)) as connection:
        sink = PostgresWriter(connection, replace(plain, job=replace(plain.job, transform="not:loaded")), fetch)
        sink.prepare(plain.layout.schema)
        assert sink.apply(replace(made, returned=Returned(kept))) == Counts(3, 1, duplicates=1, filtered=1)
    assert database.totals() == sums(some[:1])


def test_the_role_of_the_sinks_cannot_change_tables_or_forget_events(databases: Settings) -> None:
    for statement in ("DROP TABLE stock", "CREATE TABLE mine (id int)", "DELETE FROM processed_events"):
        with (
            closing(connect(databases, SinkRole.WRITER)) as connection,
            connection.cursor() as cursor,
            pytest.raises(psycopg2.errors.InsufficientPrivilege),
        ):
            cursor.execute(statement)


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
