"""`outbox down` says what it stops: on small real processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from outbox.testing.command import outbox
from tests.unit.test_process import SERVE, Script

Run = Callable[..., Script]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Starts a process of a name in a home; whatever was started is killed at the end."""
    started: list[Script] = []

    def start(name: str, home: Path = tmp_path) -> Script:
        started.append(Script(home, SERVE, name))
        started[-1].start()
        return started[-1]

    yield start
    for process in started:
        process.kill()


def down(home: Path) -> list[str]:
    """The lines that the command prints."""
    done = outbox("down", home=home)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_it_names_the_users_of_the_stack_and_then_its_parts(run: Run, tmp_path: Path) -> None:
    processes = [run(name) for name in ("postgres", "kafka", "service", "sink")]
    *stopping, last = down(tmp_path)
    assert stopping == [f"{name}: stopping" for name in ("service", "sink", "kafka", "postgres")]
    assert last == "4 parts are stopped; data stays until `outbox reset`"
    assert not any(process.processes() for process in processes)
    assert down(tmp_path) == ["nothing was running"]


def test_it_counts_stacks_in_folders_below_and_leaves_others_alone(run: Run, tmp_path: Path) -> None:
    run("service", tmp_path / "own")
    below, beside = run("kafka", tmp_path / "own" / "tests"), run("kafka", tmp_path / "other")
    assert down(tmp_path / "own") == [
        "kafka: stopping",
        "service: stopping",
        "2 parts are stopped; data stays until `outbox reset`",
    ]
    assert not below.is_running()
    assert beside.is_running()


def test_a_paused_part_is_named_too(run: Run, tmp_path: Path) -> None:
    run("connect").pause()
    assert down(tmp_path)[0] == "connect: stopping"
