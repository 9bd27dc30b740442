"""Events older than the deduplication horizon, at a sink. (test_retention.py raises the horizon.)"""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from uuid import UUID

import pytest

from outbox.base.settings import Settings
from outbox.maintenance import retention
from outbox.sink import discovery
from outbox.sink.remembering.dead_letters import OLDER_THAN_HORIZON
from outbox.sink.repair.replay import Replayed
from outbox.sink.writer import Counts
from outbox_lab.testing import command
from tests.support.made_events import NOW_MS, STRATEGIES, Event, batch, nth_key, sums, uuid7
from tests.support.record_corpus import unread
from tests.support.sink_driver import Database, open_sink, replayed

RANDOM = random.Random(7)  # noqa: S311
DAY_MS = 24 * 60 * 60 * 1000
TODAY = datetime.fromtimestamp(NOW_MS / 1000, UTC).date()
ZERO = UUID(int=0)
FORGETTING = ("dedup", "merge")  # the strategies that retention makes forget


def aged(days: int, quantity: int = 7, number: int = 1) -> Event:
    """A new event of so many days ago, the only one of its item."""
    event_id = uuid7(RANDOM, NOW_MS - days * DAY_MS)
    return Event(event_id, nth_key(number), quantity, version=1, total_after=quantity)


def ago(days: int) -> date:
    return TODAY - timedelta(days=days)


def horizon(database: Database) -> UUID:
    ((found,),) = database.query("SELECT horizon FROM dedup_horizon")
    return UUID(str(found))


def days(database: Database) -> list[str]:
    """The partitions there are."""
    return [str(name) for (name,) in database.query("SELECT name FROM processed_partitions ORDER BY bound")]


def partition(days_ago: int) -> str:
    return f"processed_events_{ago(days_ago):%Y%m%d}"


def apply(settings: Settings, *events: Event, start: int = 0, name: str = "dedup") -> Counts:
    with open_sink(settings, name) as sink:
        return sink.apply(batch(events, start))


def run_replay(settings: Settings, *, older_than_horizon: bool) -> Replayed:
    """Replay the open dead letters of `dedup`."""
    return replayed(settings, discovery.sinks(settings)["dedup"], older_than_horizon=older_than_horizon)


def status(database: Database, event: Event) -> str:
    ((found,),) = database.query("SELECT status FROM dead_letters WHERE identity = %s", event.event_id)
    return str(found)


class TestBesideASink:
    def test_a_rising_horizon_applies_each_event_once_or_sets_it_aside(
        self, databases: Settings, database: Database
    ) -> None:
        """Three sinks read events of twenty days, each event thrice, while retention forgets day after day."""
        seed = random.randrange(1 << 32)  # noqa: S311
        print(f"seed: {seed}")  # noqa: T201
        chance = random.Random(seed)  # noqa: S311
        some = [aged(chance.randrange(20), quantity=number + 1, number=number) for number in range(60)]
        errors: list[BaseException] = []

        def read(name: str, order: list[Event]) -> None:
            try:
                with open_sink(databases, name) as sink:
                    for start in range(0, len(order), 4):
                        sink.apply(batch(order[start : start + 4], start))
            except BaseException as error:
                errors.append(error)

        orders = [chance.sample(some * 3, 180) for _ in range(3)]
        names = (*FORGETTING, "upsert")
        sinks = [threading.Thread(target=read, args=pair) for pair in zip(names, orders, strict=True)]
        for thread in sinks:
            thread.start()
        for upto in range(19, 1, -1):
            retention.drop(databases, ago(upto))
        for thread in sinks:
            thread.join()
        assert errors == []
        for name in FORGETTING:
            sink = Database(databases, name)
            set_aside = sink.dead_letters()
            assert set(set_aside.values()) <= {OLDER_THAN_HORIZON}
            assert all(UUID(identity) < horizon(database) for identity in set_aside)
            found = sink.totals()
            assert sums(some).items() >= found.items(), "what was applied was applied once"
            assert {one.event_id for one in some if one.key not in found} <= set_aside.keys()
        assert Database(databases, "upsert").totals() == sums(some)


class TestOlderEvents:
    def test_a_set_aside_event_moves_no_total_and_is_not_remembered(
        self, databases: Settings, database: Database
    ) -> None:
        new, late = aged(5, 5), aged(6, number=2)
        retention.drop(databases, ago(5))
        with open_sink(databases) as sink:
            assert sink.apply(batch([late, new, late])) == Counts(rows=3, applied=1, duplicates=1, rejected=1)
            assert sink.apply(batch([late, late], start=3)) == Counts(2, 0, 2), "nor does a re-send change that"
        assert database.totals() == sums([new])
        assert database.processed() == 1
        assert database.dead_letters() == {late.event_id: OLDER_THAN_HORIZON}
        ((detail, event_id),) = database.query("SELECT detail, event_id FROM dead_letters")
        assert (str(horizon(database)) in str(detail), event_id) == (True, late.event_id)
        assert database.query("SELECT applied, duplicates FROM sinks") == [(1, 3)]

    @pytest.mark.parametrize("name", FORGETTING)
    def test_one_applied_before_it_was_forgotten_is_not_applied_again(self, databases: Settings, name: str) -> None:
        database = Database(databases, name)
        old = aged(6)
        apply(databases, old, name=name)
        retention.drop(databases, ago(5))
        retention.delete_rows(databases, horizon(database), keep_days=1)
        assert database.query("SELECT FROM landed_events") == []
        assert database.processed() == 0
        assert apply(databases, old, start=1, name=name) == Counts(1, rejected=1)
        assert database.totals() == sums([old])
        assert database.query("SELECT FROM landed_events") == [], "a set-aside event is not remembered either"
        assert database.processed() == 0

    def test_an_event_at_the_horizon_is_applied(self, databases: Settings, database: Database) -> None:
        retention.drop(databases, ago(5))
        first_ms = horizon(database).int >> 80
        at, below = (Event(uuid7(RANDOM, first_ms + step), nth_key(2 + step), 1, version=1) for step in (0, -1))
        apply(databases, at, below)
        assert database.dead_letters() == {below.event_id: OLDER_THAN_HORIZON}
        assert database.totals() == sums([at])

    @pytest.mark.parametrize("name", sorted(set(STRATEGIES) - set(FORGETTING)))
    def test_strategies_that_forget_nothing_apply_it(self, databases: Settings, name: str) -> None:
        late = aged(6)
        retention.drop(databases, ago(5))
        assert apply(databases, late, name=name) == Counts(1, 1)
        assert Database(databases, name).totals() == sums([late])


class TestWayOut:
    def test_replay_refuses_it_and_with_the_flag_applies_it_once(self, databases: Settings, database: Database) -> None:
        late = aged(6)
        retention.drop(databases, ago(5))
        apply(databases, late)
        assert run_replay(databases, older_than_horizon=False) == Replayed(rejected=1)
        assert (status(database, late), database.totals()) == ("open", {})
        assert run_replay(databases, older_than_horizon=True) == Replayed(applied=1)
        assert run_replay(databases, older_than_horizon=True) == Replayed()
        assert (status(database, late), database.totals()) == ("replayed", sums([late]))
        assert apply(databases, late, start=1) == Counts(1, 0, 1), "its dead letter remembers it"
        assert database.totals() == sums([late])
        assert days(database) == []

    def test_an_event_of_a_clock_that_was_ahead_is_replayed_when_its_time_has_come(
        self, databases: Settings, database: Database
    ) -> None:
        early, too_early = aged(0), replace(aged(-2), version=2)  # recorded three days ago
        dead = [unread(one, offset, reason="id from the future") for offset, one in enumerate([early, too_early])]
        dead = [one._replace(record=one.record._replace(recorded_ms=NOW_MS - 3 * DAY_MS)) for one in dead]
        with open_sink(databases) as sink:
            sink.apply(batch([], dead=dead))
        assert run_replay(databases, older_than_horizon=False).applied == 1
        assert (status(database, early), status(database, too_early)) == ("replayed", "open")
        assert database.totals() == sums([early])

    def test_the_flag_is_for_its_own_letters_only(self, databases: Settings, database: Database) -> None:
        first, late = aged(0, 5), aged(6, number=2)
        other = replace(aged(0), unit="LTR", version=2)
        retention.drop(databases, ago(5))
        apply(databases, first, late, other)
        assert run_replay(databases, older_than_horizon=True) == Replayed(applied=1)
        assert database.dead_letters()[other.event_id] == "unit mismatch"
        assert (status(database, late), status(database, other)) == ("replayed", "open")
        assert database.totals() == sums([first, late])

    def test_the_command(self, databases: Settings, database: Database) -> None:
        late = aged(6)
        retention.drop(databases, ago(5))
        apply(databases, late)

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
