"""A sink whose target is a function, as a process on each engine."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

import pytest

from outbox.base.settings import Settings
from tests import targets
from tests.support.made_events import Event, sums
from tests.support.sink_driver import Database
from tests.support.sink_process import Publisher, catch_up_faulty, catch_up_faulty_alone, logged, run_faulty
from tests.transforms import LEFT_OUT

PLAIN = "--plain"


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(targets.FILE, str(tmp_path / "target.db"))
    return tmp_path / "target.db"


def test_a_kill_between_the_function_and_the_commit_repeats_nothing(
    topic: Settings, publisher: Publisher, database: Database, file: Path
) -> None:
    sent: list[Event] = []
    for catch_up, names in ((catch_up_faulty_alone, [PLAIN, "dedup"]), (catch_up_faulty, ["dedup"])):
        some = publisher.events(300)
        publisher.send(some[:100])
        first = catch_up("function_target", topic, *names)
        assert first.returncode == 0, first.stderr
        publisher.send([*some[100:], *some[:10]])
        before = database.positions()
        killed = catch_up_faulty_alone("death_behind_a_function", topic, *names)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        assert database.positions() == before
        assert targets.found() != sums([*sent, *some[:100]]), "it has written"
        last = catch_up("function_target", topic, *names)
        assert last.returncode == 0, last.stderr
        sent += some
        assert targets.found() == sums(sent)
        [*_, applied] = logged(last, "applied")
        assert database.applied() == len(sent), applied
    file.unlink()
    rebuilt = run_faulty("function_target", topic, "rebuild", "dedup", "--from", "topic", "--yes")
    assert rebuilt.returncode == 0, rebuilt.stderr
    assert targets.found() == sums(sent), "a new place is filled from the topic"
    assert database.applied() == len(sent)


def test_the_function_gets_what_the_transform_returns(
    topic: Settings, publisher: Publisher, database: Database
) -> None:
    some = publisher.events(150)
    hidden = [replace(one, quantity=LEFT_OUT) for one in publisher.events(5)]
    failing = [replace(one, quantity=targets.THIRTEEN) for one in publisher.events(1)]
    publisher.send([*some, *hidden, *failing])
    done = catch_up_faulty("function_behind_transform", topic, "dedup")
    assert done.returncode == 0, done.stderr
    assert targets.found() == sums(some)
    assert database.dead_letters() == {failing[0].event_id: "transform failed"}
