"""Whatever runs in the homes of a test run ends with that run: on small real processes."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import psutil
import pytest

from outbox.base.wait import wait_for
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
def root(tmp_path: Path) -> Path:
    """The folder of several runs."""
    return tmp_path / "homes"


@pytest.fixture
def start(root: Path) -> Iterator[Start]:
    """Starts a run with a process in one of its homes."""
    runs: list[subprocess.Popen[str]] = []

    def begin() -> tuple[subprocess.Popen[str], Script]:
        run = subprocess.Popen([sys.executable, "-c", RUN, root], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        runs.append(run)
        assert run.stdout is not None
        return run, Script(Path(run.stdout.readline().strip()), SERVE)

    yield begin
    for run in runs:
        run.kill()
        run.communicate()
    homes.sweep(root)


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


def test_outbox_down_stops_and_the_next_run_deletes_what_killed_runs_have_left(start: Start, root: Path) -> None:
    stopped, process = start()
    kill_with_watchdog(stopped, process)
    assert outbox("down", home=root.parent).returncode == 0
    assert process.processes() == []
    kill_with_watchdog(*start())
    Homes(root).close(keep_logs=False)
    assert list(root.iterdir()) == []


def test_a_run_does_not_touch_what_another_run_uses(start: Start, root: Path) -> None:
    _, process = start()
    Homes(root).close(keep_logs=False)
    assert process.is_running()
    assert process.folder.exists()


def test_a_run_about_to_lock_its_folder_is_alive(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = fcntl.flock

    def sweep_first(file: IO[str], options: int) -> None:
        if options == fcntl.LOCK_EX:  # the new run's own; a sweep does not wait for its locks
            homes.sweep(root)
        lock(file, options)

    monkeypatch.setattr(fcntl, "flock", sweep_first)
    run = Homes(root)
    assert run.new("home").is_dir()
    run.close(keep_logs=False)


def test_orderly_run_deletes_its_folder_or_keeps_the_logs(root: Path) -> None:
    for keep_logs in (False, True):
        run = Homes(root)
        home = run.new("home")
        assert " " in home.name
        assert not home.name.isascii()
        process = Script(home, SERVE)
        process.start()
        run.close(keep_logs=keep_logs)
        assert process.processes() == []
        assert not process.folder.exists()
        assert process.log_file.exists() is keep_logs
