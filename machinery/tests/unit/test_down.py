"""`outbox down` says what it stops: on small real processes."""

from __future__ import annotations

import os
import pwd
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from outbox_lab.stack.process import MARK
from outbox_lab.testing.command import outbox
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


@contextmanager
def process_of_nobody(mark: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process of another user, who has put a mark of ours into its environment."""
    nobody = pwd.getpwnam("nobody")
    user = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
    with subprocess.Popen(["sleep", "600"], env={MARK: mark}, cwd="/", start_new_session=True, **user) as process:  # type: ignore[call-overload]
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root reads and ends processes of other users")
@pytest.mark.parametrize(
    "mark", ["{home}/../evil:x", "{home}/../evil:postgres", "{home}/below:x", "{home}:x", "{home}:postgres"]
)
def test_process_of_another_user_is_not_ours(mark: str, tmp_path: Path) -> None:
    home, evil, victim = tmp_path / "home", tmp_path / "evil", tmp_path / "victim"
    home.mkdir()
    evil.mkdir()
    victim.write_text("content")
    (evil / "lock").symlink_to(victim)
    with process_of_nobody(mark.format(home=home)) as stranger:
        assert down(home) == ["nothing was running"]
        assert stranger.poll() is None
    assert victim.read_text() == "content"
    assert {path.name for path in tmp_path.rglob("*")} == {"home", "evil", "lock", "victim"}


def test_a_home_is_the_same_by_a_link_and_a_paused_part_is_ended(run: Run, tmp_path: Path) -> None:
    home = tmp_path / "home"
    process, stranger = run("service", home), run("x", home / ".." / "evil")
    process.pause()
    (tmp_path / "link").symlink_to("home")
    assert down(tmp_path / "link")[0] == "service: stopping"
    assert not process.is_running()
    assert stranger.is_running(), "its mark leads out of the home"


def test_lock_that_is_a_link_is_refused(tmp_path: Path) -> None:
    home, victim = tmp_path / "home", tmp_path / "victim"
    home.mkdir()
    victim.write_text("content")
    (home / "lock").symlink_to(victim)
    assert "lock" in outbox("down", home=home).stderr
    assert "lock" in outbox("up", "postgres", home=home).stderr
    assert victim.read_text() == "content"


def test_down_makes_no_home(tmp_path: Path) -> None:
    assert down(tmp_path / "absent") == ["nothing was running"]
    assert not (tmp_path / "absent").exists()
