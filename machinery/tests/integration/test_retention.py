"""Retention against a real Postgres: partitions of processed_events, useless rows, and events older than the
deduplication horizon; and strategies of an adopter's own, whose memory is treated like ours.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg2
import pytest

from outbox.base.database import connect
from outbox.base.settings import DatabaseUrl, Settings, SinkRole
from outbox.base.wait import wait_for
from outbox.maintenance import retention
from outbox.maintenance.retention import Evidence
from outbox.sink import discovery
from outbox.sink.decoding.values import day_of
from outbox.sink.remembering import fence, strategy
from outbox.sink.remembering.dead_letters import OLDER_THAN_HORIZON
from outbox.sink.writer import Counts
from outbox_lab.testing import command
from outbox_lab.testing.failures import raises
from tests.support import kept_rows
from tests.support.kept_rows import aged, ago, partition, remember
from tests.support.made_events import DAY_MS, JOB, NOW_MS, Event, batch, nth_key, sums, uuid7
from tests.support.sink_driver import Database, open_sink, sink_on
from tests.support.topic_reader import topic_of

pytestmark = pytest.mark.usefixtures("whole_day")

RANDOM = random.Random(7)  # noqa: S311
ZERO = UUID(int=0)
DEFAULT_LOCKS = 64 * 100  # max_locks_per_transaction * max_connections of a default Postgres
LOCKS = "SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid()"


def day_id(day: date) -> str:
    """A UUIDv7 of noon on a day."""
    return kept_rows.id_of(datetime(day.year, day.month, day.day, 12, tzinfo=UTC))


def event_of(days: int, quantity: int = 7, number: int = 1) -> Event:
    """A new event of so many days ago, the only one of its item."""
    return Event(uuid7(RANDOM, NOW_MS - days * DAY_MS), nth_key(number), quantity, 1, total_after=quantity)


def ensure(settings: Settings, *days: date) -> None:
    with closing(connect(settings, SinkRole.WRITER)) as connection:
        strategy.ensure_partitions(connection, days)


def create_sink(settings: Settings, sink: str) -> None:
    with closing(connect(settings, SinkRole.WRITER)) as connection:
        fence.acquire(connection, sink)


class TestPartitions:
    def test_an_old_month_with_days_of_its_own_gets_the_gaps_between(self, databases: Settings) -> None:
        for day in (date(2019, 2, 5), date(2019, 2, 6), date(2019, 2, 20)):
            bounds = [f"('{retention.first_uuid(one)}')" for one in (day, day + timedelta(days=1))]
            of = f"PARTITION OF processed_events FOR VALUES FROM {bounds[0]} TO {bounds[1]}"
            kept_rows.query(databases, f"CREATE TABLE day_{day:%d} {of}")
        month = [date(2019, 2, 1) + timedelta(days=number) for number in range(28)]
        assert remember(databases, *map(day_id, month)) == 28
        assert kept_rows.names(databases) == [
            "processed_events_20190201_20190204",
            "day_05",
            "day_06",
            "processed_events_20190207_20190219",
            "day_20",
            "processed_events_20190221_20190228",
        ]

    def test_ids_of_fifty_years_take_few_locks_to_make_and_to_insert(self, databases: Settings) -> None:
        days = kept_rows.spread(years=50, count=6000)
        with closing(connect(databases, SinkRole.WRITER)) as connection, connection.cursor() as cursor:
            is_complete, locks = False, []
            while not is_complete:
                cursor.execute("SELECT ensure_processed_events(%s::date[])", [list(days)])
                ((is_complete,),) = cursor.fetchall()
                cursor.execute(LOCKS)
                locks.append(int(cursor.fetchall()[0][0]))
                connection.commit()
        assert max(locks) < 500
        assert len(kept_rows.names(databases)) <= 700
        events = [day_id(day) for day in days]
        assert remember(databases, *events) == len(set(days)) == 6000
        assert remember(databases, *events) == 0, "and each is a duplicate now"
        # Each partition and, while the statement runs, its index.
        assert 2 * len(kept_rows.names(databases)) < DEFAULT_LOCKS / 4

    def test_a_day_below_the_horizon_needs_none(self, databases: Settings) -> None:
        retention.drop(databases, ago(5))
        ensure(databases, ago(6), ago(5), date(2019, 2, 3))
        assert kept_rows.names(databases) == [partition(5)]


class TestHorizon:
    def test_whole_partitions_below_it_are_dropped_and_the_others_stay(self, databases: Settings) -> None:
        assert kept_rows.horizon(databases) == ZERO
        old = kept_rows.id_of(datetime(2019, 2, 3, tzinfo=UTC))
        remember(databases, old, *(aged(number) for number in (0, 1, 5, 6, 7)))
        assert retention.drop(databases, date(2019, 2, 28)) == (), "the month reaches beyond it"
        dropped = retention.drop(databases, ago(5))
        assert [part.name for part in dropped] == ["processed_events_20190201_20190228", partition(7), partition(6)]
        assert all(part.bytes > 0 for part in dropped)
        assert kept_rows.names(databases) == [partition(5), partition(1), partition(0)]
        assert day_of(kept_rows.horizon(databases)) == ago(5)
        assert retention.below(databases, ago(5)) == ()

    @pytest.mark.parametrize("name", ["dedup", "merge"])
    def test_an_event_at_the_horizon_is_applied_and_one_below_it_is_set_aside(
        self, databases: Settings, name: str
    ) -> None:
        database = Database(databases, name)
        retention.drop(databases, ago(5))
        first_ms = kept_rows.horizon(databases).int >> 80
        at, below = (Event(uuid7(RANDOM, first_ms + step), nth_key(2 + step), 1, version=1) for step in (0, -1))
        with open_sink(databases, name) as sink:
            assert sink.apply(batch([below, at, below])) == Counts(rows=3, applied=1, duplicates=1, rejected=1)
        assert database.totals() == sums([at])
        assert database.dead_letters() == {below.event_id: OLDER_THAN_HORIZON}
        ((detail,),) = database.query("SELECT detail FROM dead_letters")
        assert str(kept_rows.horizon(databases)) in str(detail)
        memory = "SELECT event_id FROM processed_events UNION ALL SELECT event_id FROM landed_events"
        assert kept_rows.query(databases, memory) == [(at.event_id,)], "what is set aside is not remembered"

    def test_the_command_applies_an_older_event(self, databases: Settings, database: Database) -> None:
        late = event_of(6)
        retention.drop(databases, ago(5))
        with open_sink(databases) as sink:
            sink.apply(batch([late]))

        def run(*words: str) -> tuple[int, str]:
            done = command.outbox("dead-letters", "replay", *words, home=databases.home, **databases.as_env())
            assert "Traceback" not in done.stderr
            return done.returncode, done.stdout + done.stderr

        assert run("--older-than-horizon")[0] == 2, "it says how, not which"
        code, output = run("--all")
        assert (code, "--older-than-horizon" in output) == (1, True)
        code, output = run(late.event_id, "--older-than-horizon")
        assert (code, "1 applied" in output) == (0, True)
        assert database.totals() == sums([late])

    def test_it_is_never_lowered(self, databases: Settings) -> None:
        for day in (6, 9, 6):
            retention.drop(databases, ago(day))
            assert day_of(kept_rows.horizon(databases)) == ago(6)
        retention.drop(databases, ago(4))
        assert day_of(kept_rows.horizon(databases)) == ago(4)

    @pytest.mark.parametrize("day", [0, -1])
    def test_today_and_yesterday_are_kept_whatever_is_asked_for(self, databases: Settings, day: int) -> None:
        remember(databases, aged(1))
        with raises("database-refused", "today and yesterday are kept"):
            retention.drop(databases, ago(day))
        assert (kept_rows.horizon(databases), kept_rows.names(databases)) == (ZERO, [partition(1)])
        retention.drop(databases, ago(1))
        assert kept_rows.names(databases) == [partition(1)]


class TestBesideASink:
    def test_a_sink_that_is_created_meanwhile_waits_and_sees_one_horizon(
        self, databases: Settings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Else a batch of it could take an event as neither older nor newer than the horizon."""
        monkeypatch.setattr(retention, "LOCK_TIMEOUT_S", 60)
        kept_rows.start(databases, "merge")
        drop = threading.Thread(target=retention.drop, args=(databases, ago(5)))
        create = threading.Thread(target=create_sink, args=(databases, "dedup"))
        with kept_rows.cursor_of(databases) as cursor:
            fence.lock(cursor, "merge")
            drop.start()
            wait_for("the drop to wait", lambda: kept_rows.has_waiting(databases, "ExclusiveLock"), timeout_s=20)
            create.start()
            wait_for("the new sink to wait", lambda: kept_rows.has_waiting(databases, "ShareLock"), timeout_s=20)
            assert kept_rows.horizon(databases) == ZERO
        for thread in (drop, create):
            thread.join()
        assert day_of(kept_rows.horizon(databases)) == ago(5)

    @pytest.mark.parametrize("holder", ["sink dedup is in a transaction", "another session uses the tables"])
    def test_a_transaction_that_does_not_end_is_named(
        self, databases: Settings, monkeypatch: pytest.MonkeyPatch, holder: str
    ) -> None:
        monkeypatch.setattr(retention, "LOCK_TIMEOUT_S", 0.2)
        monkeypatch.setattr(retention, "TURN_TIMEOUT_S", 0.3)
        remember(databases, aged(6))
        with kept_rows.cursor_of(databases) as cursor:
            if "sink" in holder:
                fence.lock(cursor, "dedup")
            else:
                cursor.execute("SELECT FROM processed_events")
            with raises("sinks-busy", holder):
                retention.drop(databases, ago(5))
            assert (kept_rows.horizon(databases), kept_rows.names(databases)) == (ZERO, [partition(6)])
            # Nor does it stand in a sink's way between its attempts.
            if "sink" not in holder:
                remember(databases, aged(0))
        assert [part.name for part in retention.drop(databases, ago(5))] == [partition(6)]

    def test_a_drop_that_is_killed_before_it_commits_has_dropped_nothing_more(
        self, databases: Settings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(retention, "LOCK_TIMEOUT_S", 60)
        ensure(databases, *kept_rows.spread(years=10, count=200))
        before = kept_rows.names(databases)
        with kept_rows.cursor_of(databases, SinkRole.OWNER) as reader, ThreadPoolExecutor() as pool:
            reader.execute(f"SELECT FROM {before[60]}")
            dropping = pool.submit(retention.drop, databases, ago(5))
            kill = partial(kept_rows.query, databases, KILL, role=SinkRole.PRUNER)
            assert wait_for("the second transaction to wait", kill, timeout_s=20) == [(True,)]
            with raises("database-connection-lost"):
                dropping.result()
        assert day_of(kept_rows.horizon(databases)) == ago(5), "the first transaction has committed"
        assert kept_rows.names(databases) == before[50:], "and the second has not"
        retention.expire(databases, nudge=unwanted)
        assert kept_rows.names(databases) == [name for name in before if name >= partition(5)]


KILL = """
SELECT pg_terminate_backend(pid) FROM pg_locks
 WHERE locktype = 'relation' AND mode = 'AccessExclusiveLock' AND NOT granted
   AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""
FORGETTING = [
    "SELECT drop_processed_events('2020-01-01')",
    "UPDATE dedup_horizon SET horizon = horizon",
    "DELETE FROM processed_events",
    "TRUNCATE processed_events",
    "DROP TABLE processed_events",
    "DELETE FROM landed_events",
    "DELETE FROM processed_changes",
    "DELETE FROM dead_letters",
    "UPDATE landed_events SET event_id = event_id",
]
CANNOT: dict[SinkRole, Sequence[str]] = {
    SinkRole.WRITER: [*FORGETTING, "DROP TABLE stock", "CREATE TABLE mine (id int)"],
    SinkRole.AUDITOR: FORGETTING,
    SinkRole.PRUNER: [
        "INSERT INTO processed_events VALUES ('dedup', uuidv7())",
        "UPDATE dedup_horizon SET horizon = horizon",
        "UPDATE dead_letters SET status = 'open'",
        "UPDATE sinks SET epoch = epoch",
        "SELECT ensure_processed_events(ARRAY[current_date])",
        "SELECT value FROM dead_letters",
        "SELECT event FROM landed_events",
    ],
}


@pytest.mark.parametrize("role", CANNOT)
def test_only_the_pruner_forgets_and_it_reads_no_event(shared_databases: Settings, role: SinkRole) -> None:
    for statement in CANNOT[role]:
        with pytest.raises(psycopg2.errors.InsufficientPrivilege):
            kept_rows.query(shared_databases, statement, role=role)
    may = "SELECT has_function_privilege('ensure_processed_events(date[])', 'EXECUTE'),"
    may += " has_function_privilege('drop_processed_events(date)', 'EXECUTE')"
    found = kept_rows.query(shared_databases, may, role=role)
    assert found == [(role is SinkRole.WRITER, role is SinkRole.PRUNER)]


class TestExpire:
    """Kafka does not run here, so whatever asks it fails."""

    def test_with_nothing_to_forget_kafka_and_the_source_are_not_asked(self, databases: Settings) -> None:
        remember(databases, aged(0), aged(1))
        kept_rows.land(databases, aged(0), aged(20))
        kept_rows.set_aside(databases, "young", aged(0), status="replayed", seen_days_ago=1)
        kept_rows.set_aside(databases, "open", aged(200))
        kept_rows.set_aside(databases, "discarded", aged(200), status="discarded", is_event=True)
        nowhere = databases.replace(source_db_url=DatabaseUrl(port=1))
        result = retention.expire(nowhere, nudge=unwanted)
        assert (result.evidence, result.dropped, result.deleted) == ((), (), {})
        assert kept_rows.horizon(databases) == ZERO

    def test_partitions_are_dropped_some_at_a_time_and_the_rest_needs_no_evidence(self, databases: Settings) -> None:
        ensure(databases, *kept_rows.spread(years=10, count=200))
        kept_rows.start(databases, "dedup")
        with kept_rows.cursor_of(databases, SinkRole.PRUNER) as cursor:
            cursor.execute("SELECT drop_processed_events(%s)", [ago(1)])
            assert cursor.rowcount == 50
        left = [name for name in kept_rows.names(databases) if name < partition(1)]
        result = retention.expire(databases, nudge=unwanted)
        assert result.evidence == ()
        assert [part.name for part in result.dropped] == left
        assert len(left) > 50, "it took several transactions"

    @pytest.mark.parametrize(
        ("does", "due"),
        [
            (lambda settings: remember(settings, aged(9), aged(6)), 8),
            (lambda settings: kept_rows.land(settings, aged(101), aged(95)), 100),
            (lambda settings: kept_rows.set_aside(settings, "one", aged(99), status="discarded"), 98),
        ],
    )
    def test_each_table_alone_makes_the_horizon_rise(
        self, databases: Settings, monkeypatch: pytest.MonkeyPatch, does: Callable[[Settings], object], due: int
    ) -> None:
        does(databases)
        wanted: list[date] = []

        def found(_: Settings, day: date, __: object) -> list[Evidence]:
            wanted.append(day)
            return [Evidence("test", retention.first_uuid(ago(due - 1)))]

        monkeypatch.setattr(retention, "gather", found)
        retention.expire(databases)
        assert wanted == [ago(due)]
        assert day_of(kept_rows.horizon(databases)) == ago(due - 1)


class TestLandedEvents:
    def test_an_event_goes_when_it_is_below_the_horizon_and_old_enough(self, databases: Settings) -> None:
        far, near, young = aged(120), aged(80), aged(3)
        kept_rows.land(databases, far, near, young)
        assert retention.delete_rows(databases, ZERO) == {}
        retention.drop(databases, ago(100))
        assert retention.delete_rows(databases, kept_rows.horizon(databases), dry_run=True) == {"landed_events": 1}
        assert kept_rows.landed(databases) == {far, near, young}
        assert retention.delete_rows(databases, kept_rows.horizon(databases)) == {"landed_events": 1}
        assert kept_rows.landed(databases) == {near, young}
        retention.drop(databases, ago(2))
        assert retention.delete_rows(databases, kept_rows.horizon(databases)) == {}, "it is kept for its readers"
        assert retention.delete_rows(databases, kept_rows.horizon(databases), keep_days=1) == {"landed_events": 2}

    def test_many_are_deleted_in_small_transactions(self, databases: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(retention, "DELETE_ROWS", 40)
        old = [aged(120) for _ in range(100)]
        kept_rows.land(databases, *old)
        kept_rows.land(databases, *old[:50], sink="other")
        retention.drop(databases, ago(100))
        before = kept_rows.query(databases, "SELECT pg_current_xact_id()::text::bigint")[0][0]
        assert retention.delete_rows(databases, kept_rows.horizon(databases)) == {"landed_events": 150}
        after = kept_rows.query(databases, "SELECT pg_current_xact_id()::text::bigint")[0][0]
        assert int(str(after)) - int(str(before)) >= 3 + 2
        assert kept_rows.landed(databases) == set()


class TestDeadLetters:
    def test_only_those_go_whose_event_cannot_be_applied_without_them(self, databases: Settings) -> None:
        letters: dict[str, dict[str, Any]] = {
            "below": {"event_id": aged(120)},
            "above": {"event_id": aged(80)},
            "of the future": {"event_id": aged(-1000)},
            "without id": {},
            "without id, seen": {"seen_days_ago": 95},  # a rewind would set it aside once more, and hold up its key
            "of no v7": {"event_id": f"{aged(120)[:14]}4{aged(120)[15:]}"},
            "below, seen": {"event_id": aged(120), "seen_days_ago": 80},
            "elsewhere": {"event_id": aged(120), "topic": "other"},
            "on order": {"event_id": aged(120), "topic": topic_of(databases, "order")},
            "on former": {"event_id": aged(120), "topic": "former"},
            "valid": {"event_id": aged(120), "is_event": True},
        }
        for status, (name, letter) in product(("replayed", "discarded"), letters.items()):
            kept_rows.set_aside(databases, f"{status} {name}", status=status, **letter)
        kept_rows.stand(databases, "dedup", "former", "x")
        kept_rows.set_aside(databases, "open below", aged(120))
        kept_rows.set_aside(databases, "open without id")
        retention.drop(databases, ago(100))
        before = kept_rows.dead_letters(databases)
        horizon, oldest = kept_rows.horizon(databases), lambda *_: datetime.now(UTC) - timedelta(days=98)
        assert retention.delete_rows(databases, horizon, dry_run=True, oldest=oldest) == {"dead_letters": 11}
        assert kept_rows.dead_letters(databases) == before
        assert retention.delete_rows(databases, horizon, oldest=oldest) == {"dead_letters": 11}
        whichever = ("below", "without id", "of no v7", "on order", "on former")
        gone = {f"{status} {which}" for status in ("replayed", "discarded") for which in whichever}
        assert before - kept_rows.dead_letters(databases) == {*gone, "replayed valid"}

    def test_a_sink_that_sees_them_again_meanwhile_is_no_deadlock(self, databases: Settings) -> None:
        """Each locks many of them, in its own order."""
        kept_rows.set_aside(databases, "0", status="replayed")
        columns = 'topic, topic_id, partition, "offset", reason, detail, status, last_seen_at'
        copies = f"SELECT sink, number::text, {columns} FROM dead_letters, generate_series(1, 599) AS number"
        kept_rows.query(databases, f"INSERT INTO dead_letters (sink, identity, {columns}) {copies}")

        def see() -> None:
            for _ in range(20):
                with kept_rows.cursor_of(databases) as cursor:
                    fence.lock(cursor, "dedup")
                    for number in range(550, 0, -50):
                        see = "UPDATE dead_letters SET last_seen_at = last_seen_at WHERE identity = %s"
                        cursor.execute(see, [str(number)])

        with ThreadPoolExecutor() as pool:
            seeing = pool.submit(see)
            assert retention.delete_rows(databases, ZERO, oldest=lambda *_: None) == {"dead_letters": 600}
            seeing.result()


def unwanted() -> None:
    raise AssertionError("nobody has to nudge the relay")


IDS = """
CREATE TABLE my_ids (sink text, event_id uuid, PRIMARY KEY (sink, event_id));
GRANT SELECT, INSERT ON my_ids TO {writer};
GRANT SELECT, DELETE ON my_ids TO {pruner};
"""


def test_the_memory_of_an_own_strategy_is_forgotten_below_the_horizon(
    databases: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    roles = {role.name.lower(): databases.role_name(role) for role in (SinkRole.WRITER, SinkRole.PRUNER)}
    kept_rows.query(databases, IDS.format(**roles))
    file = tmp_path / "mine.sql"
    file.write_text((strategy.BUILT_IN / "dedup.sql").read_text().replace("processed_events", "my_ids"))
    monkeypatch.setattr(discovery, "jobs", lambda _: [replace(JOB, name="mine", strategy=file)])
    events = [event_of(days, number=days) for days in (101, 99, 3)]
    with closing(connect(databases, SinkRole.WRITER)) as connection:
        sink = sink_on(connection, strategy.find(file))
        assert sink.apply(batch(events)) == Counts(rows=3, applied=3)
        retention.drop(databases, ago(100))
        assert retention.delete_rows(databases, kept_rows.horizon(databases)) == {"my_ids": 1}
        left = kept_rows.query(databases, "SELECT event_id FROM my_ids")
        assert {str(one) for (one,) in left} == {one.event_id for one in events[1:]}
        assert sink.apply(batch(events, start=3)) == Counts(rows=3, duplicates=2, rejected=1)
