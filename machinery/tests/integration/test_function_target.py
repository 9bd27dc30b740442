"""A target that is a function: called before the commit, for what is new, whatever it does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from outbox.base.database import connect
from outbox.base.errors import Failure
from outbox.base.settings import Settings, SinkRole
from outbox.sink.applying.function import TARGET_REFUSED, FunctionTarget, FunctionWriter
from outbox.sink.repair import replay
from outbox.sink.repair.replay import Replayed, Selection
from outbox.sink.spec import SinkSpec
from tests import targets
from tests.support.made_events import MAIN, STRATEGIES, Event, batch, fetch, nth_key, sums, uuid7
from tests.support.sink_driver import Database

RANDOM = Random(47)  # noqa: S311
EVENTS = [Event(uuid7(RANDOM), nth_key(number % 3), 1 + number, number // 3 + 1) for number in range(12)]
SINK = "search"


def spec_of(function: str, strategy: str = "dedup") -> SinkSpec:
    target = FunctionTarget(f"{targets.__name__}:{function}")
    job = replace(MAIN.job, name=SINK, projections=Path("none"), target=target.name, strategy=strategy)
    return replace(MAIN, name=SINK, job=job, target=target, strategy=STRATEGIES[strategy])


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(targets.FILE, str(tmp_path / "target.db"))
    return tmp_path / "target.db"


@contextmanager
def sink(settings: Settings, function: str, strategy: str = "dedup") -> Iterator[FunctionWriter]:
    spec = spec_of(function, strategy)
    with closing(connect(settings, SinkRole.WRITER)) as connection:
        made = spec.target.writer(settings, connection, spec, fetch)
        assert isinstance(made, FunctionWriter)
        yield made


def replay_letters(settings: Settings, function: str) -> Replayed:
    spec = spec_of(function)
    with closing(connect(settings, SinkRole.WRITER)) as connection:
        chosen = Selection(sink=SINK).choose(connection)
        done = replay.replay(connection, {SINK: spec}, chosen, applier_of=lambda one: one.target.applier(settings, one))
    return done.get(SINK, Replayed())


def found() -> dict[str, int]:
    return {key: total for key, total, _ in targets.totals()}


@pytest.mark.parametrize("strategy", ["dedup", "versions", "offsets"])
def test_new_events_are_written_and_repeated_ones_are_not(databases: Settings, strategy: str) -> None:
    with sink(databases, "write", strategy) as writer:
        assert writer.apply(batch(EVENTS[:6])).applied == 6
        again = writer.apply(batch(EVENTS, 0 if strategy == "offsets" else 6))
    assert (again.applied, again.duplicates) == (6, 6)
    assert found() == sums(EVENTS)


def test_a_failure_commits_nothing_and_the_events_come_again(databases: Settings) -> None:
    thirteen = Event(uuid7(RANDOM), nth_key(1), targets.THIRTEEN, 9)
    with (
        pytest.raises(Failure, match=r"targets:fail failed in line") as failure,
        sink(databases, "fail") as writer,
    ):
        writer.apply(batch([*EVENTS, thirteen]))
    assert failure.value.code == "target-failed"
    database = Database(databases, SINK)
    assert (database.positions(), database.processed()) == ({}, 0)
    assert found() == sums([*EVENTS, thirteen]), "it was written before"
    with sink(databases, "write") as writer:
        assert writer.apply(batch([*EVENTS, thirteen])).applied == 13
    assert found() == sums([*EVENTS, thirteen])


def test_refused_events_are_set_aside_and_replayed(databases: Settings) -> None:
    thirteen = Event(uuid7(RANDOM), nth_key(1), targets.THIRTEEN, 9)
    with sink(databases, "refuse") as writer:
        counts = writer.apply(batch([*EVENTS[:5], thirteen, *EVENTS[5:]]))
    assert (counts.applied, counts.rejected) == (12, 1)
    database = Database(databases, SINK)
    assert database.dead_letters() == {thirteen.event_id: TARGET_REFUSED}
    assert found() == sums(EVENTS)
    assert replay_letters(databases, "refuse") == Replayed(rejected=1)
    assert replay_letters(databases, "write") == Replayed(applied=1)
    assert found() == sums([*EVENTS, thirteen])
    assert database.statuses() == {thirteen.event_id: "replayed"}
