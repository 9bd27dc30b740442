"""The keeper of the soak sees the ends of processes, even if another part restarts them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from outbox.base.wait import wait_for
from outbox_lab.soak.history import Death
from outbox_lab.soak.keeper import Watch, attempt, leaders
from outbox_lab.stack.process import Process

# It starts a session of its own, as a backend of Postgres does, and keeps the mark.
CHILD = "import subprocess, time; subprocess.Popen(['sleep', '60'], start_new_session=True); time.sleep(60)"


class Parent(Process):
    """A process with a child."""

    def argv(self) -> Sequence[str | Path]:
        return [sys.executable, "-c", CHILD]


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    """A process that runs, with its child."""
    one = Parent("sinks-1", tmp_path)
    one.spawn()
    wait_for("the child", lambda: len(leaders({one.mark}).get(one.mark, ())) == 2, timeout_s=120)
    yield one
    one.kill()


def watching(process: Process) -> tuple[Watch, list[Death]]:
    deaths: list[Death] = []
    return Watch({process.mark: process}, deaths), deaths


def test_a_process_that_ends_is_noted_once_between_two_looks(process: Process) -> None:
    watch, deaths = watching(process)
    watch()
    watch()
    assert not deaths
    process.kill()
    watch()
    watch()
    [death] = deaths
    assert (death.process, death.part) == ("sinks-1", "sinks")
    assert death.alive_s is not None
    assert 0 <= death.alive_s < death.at_s


def test_a_process_that_was_started_again_between_two_looks_has_ended(process: Process) -> None:
    watch, deaths = watching(process)
    watch()
    process.kill()
    process.spawn()
    watch()
    watch()
    assert len(deaths) == 1


def test_a_child_that_ends_is_no_death(process: Process) -> None:
    watch, deaths = watching(process)
    watch()
    parent, child = leaders({process.mark})[process.mark]
    assert parent == process.pid()
    psutil.Process(child).kill()
    wait_for("the child to end", lambda: len(leaders({process.mark})[process.mark]) == 1, timeout_s=120)
    watch()
    assert not deaths


def test_a_process_that_ended_before_the_first_look_has_ended(tmp_path: Path) -> None:
    watch, deaths = watching(Parent("service", tmp_path))
    watch()
    watch()
    assert [one.process for one in deaths] == ["service"]


def test_a_look_that_fails_is_reported_and_the_next_one_comes() -> None:
    said: list[str] = []

    def look() -> None:
        raise OSError("no table of processes")

    attempt(look, said.append)
    attempt(lambda: said.append("it looks again"), said.append)
    assert "no table of processes" in said[0]
    assert said[1:] == ["it looks again"]
