"""Events older than the deduplication horizon, at a sink; and strategies of an adopter's own, whose memory retention
and rebuilds treat as they treat ours. (test_retention.py raises the horizon.)
"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from uuid import UUID

import pytest

from outbox.base.database import connect
from outbox.base.settings import Settings, SinkRole
from outbox.kafka.topics import Topic
from outbox.maintenance import retention
from outbox.sink import discovery
from outbox.sink.remembering import strategy
from outbox.sink.remembering.dead_letters import OLDER_THAN_HORIZON
from outbox.sink.remembering.strategy import Strategy
from outbox.sink.repair import rebuild
from outbox.sink.repair.replay import Replayed
from outbox.sink.writer import Counts
from outbox_lab.testing import command
from tests.support import kept_rows
from tests.support.made_events import (
    DAY_MS,
    JOB,
    NOW_MS,
    STRATEGIES,
    TOPIC,
    TOPIC_ID,
    Event,
    batch,
    nth_key,
    sums,
    uuid7,
)
from tests.support.record_corpus import unread
from tests.support.sink_driver import Database, open_sink, replayed, sink_on

RANDOM = random.Random(7)  # noqa: S311
TODAY = datetime.fromtimestamp(NOW_MS / 1000, UTC).date()
FORGETTING = ("dedup", "merge")  # the strategies that retention makes forget


def aged(days: int, quantity: int = 7, number: int = 1) -> Event:
    """A new event of so many days ago, the only one of its item."""
    event_id = uuid7(RANDOM, NOW_MS - days * DAY_MS)
    return Event(event_id, nth_key(number), quantity, version=1, total_after=quantity)


def ago(days: int) -> date:
    return TODAY - timedelta(days=days)


def apply(settings: Settings, *events: Event, start: int = 0, name: str = "dedup") -> Counts:
    with open_sink(settings, name) as sink:
        return sink.apply(batch(events, start))


def run_replay(settings: Settings, *, older_than_horizon: bool) -> Replayed:
    """Replay the open dead letters of `dedup`."""
    return replayed(settings, discovery.sinks(settings)["dedup"], older_than_horizon=older_than_horizon)


class TestBesideASink:
    def test_a_rising_horizon_applies_each_event_once_or_sets_it_aside(self, databases: Settings) -> None:
        """Three sinks read events of twenty days, each event thrice, while retention forgets day after day."""
        seed = random.randrange(1 << 32)  # noqa: S311
        print(f"seed: {seed}")  # noqa: T201
        chance = random.Random(seed)  # noqa: S311
        some = [aged(chance.randrange(20), quantity=number + 1, number=number) for number in range(60)]

        def read(name: str, order: list[Event]) -> None:
            with open_sink(databases, name) as sink:
                for start in range(0, len(order), 4):
                    sink.apply(batch(order[start : start + 4], start))

        with ThreadPoolExecutor() as pool:
            sinks = [pool.submit(read, name, chance.sample(some * 3, 180)) for name in (*FORGETTING, "upsert")]
            for upto in range(19, 1, -1):
                retention.drop(databases, ago(upto))
        for one in sinks:
            one.result()
        for name in FORGETTING:
            sink = Database(databases, name)
            set_aside = sink.dead_letters()
            assert set(set_aside.values()) <= {OLDER_THAN_HORIZON}
            assert all(UUID(identity) < kept_rows.horizon(databases) for identity in set_aside)
            found = sink.totals()
            assert sums(some).items() >= found.items(), "what was applied was applied once"
            assert {one.event_id for one in some if one.key not in found} <= set_aside.keys()
        assert Database(databases, "upsert").totals() == sums(some)


class TestOlderEvents:
    @pytest.mark.parametrize("name", FORGETTING)
    def test_one_applied_before_it_was_forgotten_is_not_applied_again(self, databases: Settings, name: str) -> None:
        database = Database(databases, name)
        old = aged(6)
        apply(databases, old, name=name)
        retention.drop(databases, ago(5))
        retention.delete_rows(databases, kept_rows.horizon(databases), keep_days=1)
        assert database.query("SELECT FROM landed_events") == []
        assert database.processed() == 0
        assert apply(databases, old, start=1, name=name) == Counts(1, rejected=1)
        assert database.totals() == sums([old])
        assert database.query("SELECT FROM landed_events") == [], "a set-aside event is not remembered either"
        assert database.processed() == 0

    def test_an_event_at_the_horizon_is_applied(self, databases: Settings, database: Database) -> None:
        retention.drop(databases, ago(5))
        first_ms = kept_rows.horizon(databases).int >> 80
        at, below = (Event(uuid7(RANDOM, first_ms + step), nth_key(2 + step), 1, version=1) for step in (0, -1))
        assert apply(databases, below, at, below) == Counts(rows=3, applied=1, duplicates=1, rejected=1)
        assert apply(databases, below, start=3) == Counts(rows=1, duplicates=1)
        assert database.totals() == sums([at])
        assert database.dead_letters() == {below.event_id: OLDER_THAN_HORIZON}
        ((detail,),) = database.query("SELECT detail FROM dead_letters")
        assert str(kept_rows.horizon(databases)) in str(detail)

    @pytest.mark.parametrize("name", sorted(set(STRATEGIES) - set(FORGETTING)))
    def test_strategies_that_forget_nothing_apply_it(self, databases: Settings, name: str) -> None:
        late = aged(6)
        retention.drop(databases, ago(5))
        assert apply(databases, late, name=name) == Counts(1, 1)
        assert Database(databases, name).totals() == sums([late])


class TestWayOut:
    def test_replay_refuses_it_and_with_the_flag_applies_it_once(self, databases: Settings, database: Database) -> None:
        first, late = aged(0, 5), aged(6, number=2)
        other = replace(aged(0), unit="LTR", version=2)
        retention.drop(databases, ago(5))
        apply(databases, first, late, other)
        assert run_replay(databases, older_than_horizon=False) == Replayed(rejected=2)
        assert (set(database.statuses().values()), database.totals()) == ({"open"}, sums([first]))
        assert run_replay(databases, older_than_horizon=True) == Replayed(applied=1)
        assert run_replay(databases, older_than_horizon=True) == Replayed()
        assert database.statuses() == {late.event_id: "replayed", other.event_id: "open"}, "it is for its own letters"
        assert apply(databases, late, start=3) == Counts(1, 0, 1), "its dead letter remembers it"
        assert database.totals() == sums([first, late])

    def test_an_event_of_a_clock_that_was_ahead_is_replayed_when_its_time_has_come(
        self, databases: Settings, database: Database
    ) -> None:
        early, too_early = aged(0), replace(aged(-2), version=2)  # recorded three days ago
        dead = [unread(one, offset, reason="id from the future") for offset, one in enumerate([early, too_early])]
        dead = [one._replace(record=one.record._replace(recorded_ms=NOW_MS - 3 * DAY_MS)) for one in dead]
        with open_sink(databases) as sink:
            sink.apply(batch([], dead=dead))
        assert run_replay(databases, older_than_horizon=False).applied == 1
        assert database.statuses() == {early.event_id: "replayed", too_early.event_id: "open"}
        assert database.totals() == sums([early])

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


class TestOwnStrategy:
    """A file of a project, which remembers ids in our table, or in its own."""

    IDS = """
    CREATE TABLE my_ids (sink text, event_id uuid, PRIMARY KEY (sink, event_id));
    GRANT SELECT, INSERT ON my_ids TO {writer};
    GRANT SELECT, DELETE ON my_ids TO {pruner};
    """
    TOPICS, WHOLE = [Topic(TOPIC, TOPIC_ID, 1)], {TOPIC: {0: 0}}

    @pytest.fixture(params=["processed_events", "my_ids"])
    def own(
        self, databases: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
    ) -> Strategy:
        roles = {role.name.lower(): databases.role_name(role) for role in (SinkRole.WRITER, SinkRole.PRUNER)}
        kept_rows.query(databases, self.IDS.format(**roles))
        file = tmp_path / "mine.sql"
        file.write_text((strategy.BUILT_IN / "dedup.sql").read_text().replace("processed_events", request.param))
        monkeypatch.setattr(discovery, "jobs", lambda _: [replace(JOB, name="mine", strategy=file)])
        return strategy.find(file)

    def test_its_memory_is_forgotten_below_the_horizon_and_kept_above(self, databases: Settings, own: Strategy) -> None:
        # A partition has up to a month of ids: the one of the oldest event ends below the horizon whatever the date is.
        far, near, young = events = [aged(days, number=days) for days in (140, 99, 3)]
        assert own.memory is not None
        with closing(connect(databases, SinkRole.WRITER)) as connection:
            sink = sink_on(connection, own)
            assert sink.apply(batch(events)) == Counts(rows=3, applied=3)
            retention.drop(databases, ago(100))
            retention.delete_rows(databases, kept_rows.horizon(databases))
            left = {str(one) for (one,) in kept_rows.query(databases, f"SELECT event_id FROM {own.memory.table}")}
            assert (far.event_id in left, {near.event_id, young.event_id} <= left) == (False, True)
            assert sink.apply(batch(events, start=3)) == Counts(rows=3, duplicates=2, rejected=1)

    def test_a_rebuild_brings_a_memory_that_knows_each_event(self, databases: Settings, own: Strategy) -> None:
        events = [aged(days, number=days) for days in (5, 4, 3)]

        def apply(some: list[Event], start: int = 0, name: str = "") -> Counts:
            with closing(connect(databases, SinkRole.WRITER)) as connection:
                return sink_on(connection, own, name=name).apply(batch(some, start))

        apply(events[:2])
        with rebuild.reserved(databases, "mine") as owner:
            rebuild.begin(owner, "mine", self.TOPICS, self.WHOLE)
            apply(events, name=rebuild.copy_of("mine"))
            rebuild.swap(owner, "mine", self.TOPICS, self.WHOLE)
        assert apply(events, start=3) == Counts(rows=3, duplicates=3)
