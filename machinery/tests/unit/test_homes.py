"""Homes on small real processes: what runs there ends with its test run, and by `outbox down`."""

from __future__ import annotations

import fcntl
import os
import pwd
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import psutil
import pytest

from outbox.base.wait import wait_for
from outbox_lab.stack.process import MARK
from outbox_lab.testing import homes
from outbox_lab.testing.command import outbox
from outbox_lab.testing.homes import Homes
from tests.support.paths import ROOT
from tests.unit.test_process import SERVE, Script

RUN = f"""
import sys, time
from pathlib import Path
from typing import IO
from outbox_lab.testing.homes import Homes
from tests.unit.test_process import Script
homes = Homes(Path(sys.argv[1]))  # has the lock for as long as it is referred to
process = Script(homes.new("home"), {SERVE!r})
process.start()
print(process.home, flush=True)
time.sleep(600)
"""

Start = Callable[[], tuple[subprocess.Popen[str], Script]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a run with a process in one of its homes."""
    runs: list[subprocess.Popen[str]] = []

    def begin() -> tuple[subprocess.Popen[str], Script]:
        run = subprocess.Popen(
            [sys.executable, "-c", RUN, tmp_path / "homes"], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        runs.append(run)
        assert run.stdout is not None
        return run, Script(Path(run.stdout.readline().strip()), SERVE)

    yield begin
    for run in runs:
        run.kill()
        run.communicate()
    homes.sweep(tmp_path / "homes")


def kill_with_watchdog(run: subprocess.Popen[str], process: Script) -> None:
    """Kill a run, and before it the process that waits for its end."""
    folder = process.home.parent
    for each in psutil.process_iter(["cmdline"]):
        if (each.info["cmdline"] or [])[1:] == ["-m", homes.__name__, str(folder)]:
            each.kill()
    run.kill()
    run.wait(10)
    assert process.is_running(), "nobody has stopped it"


def test_a_killed_run_leaves_its_logs_but_no_process_and_no_data(start: Start) -> None:
    run, process = start()
    os.kill(run.pid, signal.SIGKILL)
    wait_for("the process to end", lambda: not process.processes(), timeout_s=30)
    wait_for("its data to be deleted", lambda: not process.folder.exists(), timeout_s=30)
    assert process.log_file.exists()


def test_outbox_down_stops_and_the_next_run_deletes_what_killed_runs_have_left(start: Start, tmp_path: Path) -> None:
    stopped, process = start()
    Homes(tmp_path / "homes").close(keep_logs=False)
    assert process.is_running(), "another run does not touch it"
    kill_with_watchdog(stopped, process)
    assert outbox("down", home=tmp_path).returncode == 0
    assert process.processes() == []
    kill_with_watchdog(*start())
    Homes(tmp_path / "homes").close(keep_logs=False)
    assert [*(tmp_path / "homes").iterdir()] == []


def test_a_run_about_to_lock_its_folder_is_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = fcntl.flock

    def sweep_first(file: IO[str], options: int) -> None:
        if options == fcntl.LOCK_EX:  # the new run's own; a sweep does not wait for its locks
            homes.sweep(tmp_path / "homes")
        lock(file, options)

    monkeypatch.setattr(fcntl, "flock", sweep_first)
    run = Homes(tmp_path / "homes")
    assert run.new("home").is_dir()
    run.close(keep_logs=False)


def test_orderly_run_deletes_its_folder_or_keeps_the_logs(tmp_path: Path) -> None:
    for keep_logs in (False, True):
        run = Homes(tmp_path / "homes")
        home = run.new("home")
        assert " " in home.name
        assert not home.name.isascii()
        process = Script(home, SERVE)
        process.start()
        run.close(keep_logs=keep_logs)
        assert process.processes() == []
        assert not process.folder.exists()
        assert process.log_file.exists() is keep_logs


# `outbox down` says what it stops -----------------------------------------------------------------------------------

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


def test_down_names_the_users_of_the_stack_and_then_its_parts(run: Run, tmp_path: Path) -> None:
    processes = [run(name) for name in ("postgres", "kafka", "service", "sink")]
    *stopping, last = down(tmp_path)
    assert stopping == [f"{name}: stopping" for name in ("service", "sink", "kafka", "postgres")]
    assert last == "4 parts are stopped; data stays until `outbox reset`"
    assert not any(process.processes() for process in processes)
    assert down(tmp_path) == ["nothing was running"]


def test_down_counts_stacks_in_folders_below_and_leaves_others_alone(run: Run, tmp_path: Path) -> None:
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
