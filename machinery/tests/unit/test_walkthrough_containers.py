"""The walkthrough's containers, without Docker: real processes that start again when they have ended."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from outbox.base.settings import Settings, load
from outbox.base.wait import wait_for
from outbox.relay import lifecycle
from outbox_lab.stack import ports
from outbox_lab.stack.stack import quiet
from outbox_lab.testing.failures import raises
from outbox_lab.walkthrough import containers
from outbox_lab.walkthrough.containers import Containers

# What is run as `python -m outbox …`: a main process with a child, as a driver and its JVM.
PROGRAM = """
import pathlib, signal, subprocess, sys
child = subprocess.Popen(["sleep", "600"])
def end(*_):
    pathlib.Path("ended-gently").touch()
    child.kill()
    sys.exit()
signal.signal(signal.SIGTERM, end)
pathlib.Path(f"started-{'-'.join(sys.argv[1:])}").touch()
signal.pause()
"""
SINK = ("-m", "outbox", "sink")
WORKER = ("-m", "outbox", containers.WORKER_CLASS)


RESTART = 'while :; do "$@"; done'  # as Docker does with `restart: unless-stopped`


class Engine:
    """Runs commands in the place of Docker."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._shells: list[psutil.Popen] = []
        (folder / "outbox").mkdir()
        (folder / "outbox" / "__init__.py").touch()
        (folder / "outbox" / "__main__.py").write_text(PROGRAM)

    def run(self, *commands: tuple[str, ...]) -> None:
        """Run these commands until the end; returns when they have started."""
        for command in commands:
            argv = ["sh", "-c", RESTART, "sh", sys.executable, *command]
            self._shells.append(psutil.Popen(argv, cwd=self._folder, env={"PATH": os.environ["PATH"]}))
        for command in commands:
            mark = self._folder / f"started-{'-'.join(command[2:])}"
            wait_for("the command to start", mark.exists, timeout_s=30)

    def processes(self) -> list[psutil.Process]:
        """The processes that the PID namespace shows: no other of this machine."""
        return [one for shell in self._shells for one in shell.children(recursive=True)]

    def end(self) -> None:
        """End everything."""
        running = self.processes()
        for process in (*self._shells, *running):
            process.kill()
        for shell in self._shells:
            shell.wait()


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.setattr(ports, "answers", lambda *_: True)
    one = Engine(tmp_path)
    yield one
    one.end()


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return load(tmp_path, environment=False)


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """The folder with the file of the mode."""
    folder = tmp_path / "shared"
    folder.mkdir()
    return folder


@pytest.fixture
def chain(engine: Engine, settings: Settings, shared: Path) -> Containers:
    """A worker and two containers with sinks, which run."""
    engine.run(WORKER, (*SINK,), (*SINK, "naive"), (*SINK, "orders"))
    one = Containers(settings, ["dedup", "naive"], shared, find=engine.processes)
    one.sinks.start()
    one.worker.start()
    return one


def wait_until(chain: Containers, *, mains: str, children: str) -> None:
    """Wait until the sinks' processes have these statuses: one that is on a processor takes a signal a moment later."""

    def statuses() -> set[tuple[bool, str]]:
        found = chain.sinks.mains()
        return {(one in found, one.status()) for one in chain.sinks.processes()}

    wanted = {(True, mains), (False, children)}
    wait_for(f"main processes {mains} and children {children}", lambda: statuses() == wanted, timeout_s=30)


def test_it_finds_its_processes_and_no_others(chain: Containers) -> None:
    commands = [one.cmdline()[1:] for one in chain.sinks.mains()]
    assert sorted(commands) == [[*SINK], [*SINK, "naive"]]
    assert [one.cmdline()[1:] for one in chain.worker.mains()] == [[*WORKER]]
    assert chain.worker.pid() == chain.worker.mains()[0].pid


def test_a_kill_leaves_no_process_and_docker_starts_it_again(chain: Containers, tmp_path: Path) -> None:
    family = chain.sinks.processes()
    assert len(family) == 4
    chain.sinks.kill()
    assert not chain.sinks.is_running()
    assert not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in family)
    assert not (tmp_path / "ended-gently").exists()
    chain.sinks.start()
    assert chain.sinks.is_running()
    chain.sinks.require_running()


def test_a_stop_is_gentle_even_for_a_frozen_part(chain: Containers, tmp_path: Path) -> None:
    before = chain.worker.pid()
    chain.worker.pause()
    chain.worker.stop()
    assert (tmp_path / "ended-gently").exists()
    chain.worker.start()
    assert chain.worker.pid() not in (None, before)
    assert chain.worker.is_running()


def test_spark_is_frozen_while_the_drivers_go_on_and_nothing_stays_frozen(chain: Containers) -> None:
    chain.sinks.pause_children()
    wait_until(chain, mains=psutil.STATUS_SLEEPING, children=psutil.STATUS_STOPPED)
    chain.sinks.pause()
    wait_until(chain, mains=psutil.STATUS_STOPPED, children=psutil.STATUS_STOPPED)
    chain.restore(quiet)
    wait_until(chain, mains=psutil.STATUS_SLEEPING, children=psutil.STATUS_SLEEPING)


def test_what_ended_unasked_failed_even_if_docker_restarted_it(chain: Containers) -> None:
    [worker] = chain.worker.mains()
    worker.kill()
    wait_for("another one", lambda: chain.worker.pid() not in (None, worker.pid), timeout_s=30)
    with raises("process-ended", "docker compose logs connect"):
        chain.worker.require_running()


def test_elsewhere_it_touches_nothing(settings: Settings, tmp_path: Path) -> None:
    with raises("not-in-a-container", "docker compose run"):
        Containers(settings, ["dedup"], tmp_path / "nowhere", find=lambda: pytest.fail("it looks for processes"))


def test_one_walkthrough_runs_at_a_time(settings: Settings, shared: Path) -> None:
    other = os.open(shared, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    with raises("walkthrough-running"):
        Containers(settings, ["dedup"], shared)
    os.close(other)  # as when its process ends
    Containers(settings, ["dedup"], shared)


# Switching ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def calls(shared: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Calls of Connect, each with the content of the mode's file at that moment."""
    made, file = list[tuple[str, str]](), shared / containers.MODE_FILE

    def note(what: str) -> None:
        walkthrough, mode = file.read_text().split() if file.exists() else (str(os.getpid()), "configured")
        assert walkthrough == str(os.getpid())
        made.append((what, mode))

    monkeypatch.setattr(lifecycle, "disable_exactly_once", lambda _: note("disable"))
    monkeypatch.setattr(lifecycle, "apply", lambda settings: note(f"apply {settings.exactly_once}"))
    monkeypatch.setattr(containers.Container, "stop", lambda part: note(f"stop {part.name}"))
    return made


def test_the_worker_reads_its_mode_when_it_starts_and_is_left_as_it_was_configured(
    chain: Containers, calls: list[tuple[str, str]], shared: Path
) -> None:
    chain.switch(exactly_once=False, report=quiet)
    assert calls == [("disable", "false"), ("stop connect", "false"), ("apply False", "false")]
    assert chain.settings.exactly_once is False
    calls.clear()
    chain.restore(quiet)
    assert calls == [("stop connect", "configured"), ("apply True", "configured")]
    assert [*shared.iterdir()] == []
    chain.restore(quiet)
    assert len(calls) == 2


def test_a_killed_worker_starts_in_the_requested_mode(
    chain: Containers, calls: list[tuple[str, str]], shared: Path
) -> None:
    chain.switch(exactly_once=False, report=quiet)
    calls.clear()
    chain.request(exactly_once=True)
    chain.worker.kill()
    chain.start_worker(quiet)
    assert calls == [("apply True", "true")]
    assert chain.settings.exactly_once is True
    chain.restore(quiet)
    assert calls == [("apply True", "true")], "it runs as it was configured"
    assert [*shared.iterdir()] == []
