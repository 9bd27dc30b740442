"""The process controller, on small real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil
import pytest

from outbox.base.settings import SECRET_NAMES, load, variable
from outbox.base.wait import wait_for
from outbox_lab.stack.command import Command, service, sink
from outbox_lab.stack.process import EMPTY_READS, MARK, Process, environment
from outbox_lab.testing.failures import raises

SERVE = "import time, pathlib; pathlib.Path('ready').touch(); time.sleep(600)"
DEAF = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SERVE}"
ERASE = """
with open("/proc/self/stat", "rb") as stat, open("/proc/self/mem", "r+b", buffering=0) as memory:
    begin, end = map(int, stat.read().split()[-3:-1])
    memory.seek(begin)
    memory.write(bytes(end - begin))
"""
PARENT = f"import subprocess, sys; [subprocess.Popen([sys.executable, '-c', {DEAF!r}]) for _ in range(2)]; {SERVE}"


class Script(Process):
    """A Python program under control; ready when it has made the file `ready`."""

    start_timeout_s = 10.0
    stop_timeout_s = 10.0

    def __init__(self, home: Path, program: str, name: str = "script") -> None:
        super().__init__(name, home)
        self.program = program

    def argv(self) -> Sequence[str | Path]:
        return [sys.executable, "-c", self.program]

    def env(self) -> Mapping[str, str]:
        return {"GIVEN": "yes"}

    def prepare(self) -> None:
        (self.folder / "ready").unlink(missing_ok=True)

    def is_ready(self) -> bool:
        return (self.folder / "ready").exists()


Make = Callable[..., Script]


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Make]:
    """Makes a controlled program; whatever was made is killed at the end."""
    made = []

    def make(program: str = SERVE, name: str = "script", home: Path = tmp_path) -> Script:
        made.append(Script(home, program, name))
        return made[-1]

    yield make
    for process in made:
        process.kill()


def main(process: Process) -> psutil.Process:
    """The main process of a part that runs."""
    pid = process.pid()
    assert pid is not None
    return psutil.Process(pid)


def _orphan(process: Process) -> None:
    """Kill the main process alone, once its two children live."""
    wait_for("parent and children", lambda: len(process.processes()) == 3, timeout_s=5)
    main(process).kill()
    wait_for("the parent to be gone", lambda: not process.is_running(), timeout_s=5)


def test_it_starts_in_its_folder_and_session_and_gets_nothing_else_from_the_shell(
    script: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of the developer")
    process = script()
    assert not process.is_running()
    process.start()
    assert process.is_running()
    assert process.is_ready()
    found = main(process)
    assert Path(found.cwd()) == tmp_path / "script"
    assert os.getsid(found.pid) == found.pid != os.getsid(0), "no terminal ends it"
    given = found.environ()
    assert (given["GIVEN"], given[MARK], given["PATH"]) == ("yes", f"{tmp_path}:script", os.environ["PATH"])
    assert "AWS_SECRET_ACCESS_KEY" not in given


def test_a_command_gets_the_shell_s_variables_and_its_own_secrets_only(tmp_path: Path) -> None:
    settings = load(tmp_path, environment=False, **dict.fromkeys(SECRET_NAMES, "hush"))

    def given(one: Command) -> set[str]:
        assert one.inherits("AWS_SECRET_ACCESS_KEY")
        assert not one.inherits("OUTBOX_SERVICE_TOKEN")
        return {name for name, value in one.env().items() if value == "hush"}

    assert given(service(settings)) == {"OUTBOX_SOURCE_DB_APP_PASSWORD", "OUTBOX_SERVICE_TOKEN"}
    assert given(sink(settings, "any")) == {"OUTBOX_SINK_DB_WRITER_PASSWORD", "OUTBOX_KAFKA_PASSWORD"}
    assert given(Command("check", settings, ["check"])) == {variable(name) for name in SECRET_NAMES}


def test_a_wait_that_needs_a_process_ends_with_it(script: Make) -> None:
    process = script("print('no room left')")
    process.spawn()
    with raises("process-ended", "no room left"):
        wait_for("what it would do", lambda: False, timeout_s=60, needs=process.require_running)


def test_every_controller_finds_what_another_one_started_or_ended(script: Make) -> None:
    one, other = script(), script()
    one.start()
    first = one.pid()
    other.start()
    assert one.pid() == other.pid() == first, "it runs already"
    other.kill()
    assert one.pid() is None
    other.start()
    assert one.pid() == other.pid() != first
    other.stop()
    assert one.processes() == []


def test_one_that_keeps_replacing_its_program_is_seen_running(script: Make) -> None:
    again = 'touch ready; exec sh -c "$AGAIN"'
    process = script(f"import os; os.environ['AGAIN'] = {again!r}; os.execvp('sh', ['sh', '-c', os.environ['AGAIN']])")
    process.start()
    assert all(process.is_running() for _ in range(200))


@pytest.mark.skipif(not psutil.LINUX, reason="erases its environment as Linux lets it")
def test_one_that_has_erased_its_environment_is_looked_at_once(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", f"{ERASE}\n{SERVE}"], cwd=tmp_path) as erased:
        wait_for("the environment to be erased", (tmp_path / "ready").exists, timeout_s=10)

        def look_s() -> float:
            began_at = time.monotonic()
            assert environment(psutil.Process(erased.pid)) == {}
            return time.monotonic() - began_at

        try:
            assert min(look_s() for _ in range(5)) < EMPTY_READS / 1000
        finally:
            erased.kill()


def test_it_outlives_the_command_that_started_it(script: Make, tmp_path: Path) -> None:
    program = (
        "import os, signal, sys, pathlib\n"
        "from tests.unit.test_process import SERVE, Script\n"
        "Script(pathlib.Path(sys.argv[1]), SERVE).start()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, tmp_path], check=False, timeout=30)
    assert done.returncode == -signal.SIGKILL
    process = script()
    assert process.is_running()
    process.stop()
    assert process.processes() == []


def test_stop_asks_first_and_kills_what_does_not_hear_it_after_its_time(script: Make) -> None:
    bye = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: (print('bye', flush=True), sys.exit()))"
    polite, deaf = script(f"{bye}; {SERVE}", "polite"), script(DEAF, "deaf")
    deaf.stop_timeout_s = 0.5
    for process in (polite, deaf):
        process.start()
        began_at = time.monotonic()
        process.stop()
        assert process.processes() == []
    assert polite.tail() == "bye"
    assert time.monotonic() - began_at >= 0.5


class Fertile(Script):
    """A part that starts one more process behind the first look at those that it has."""

    last: subprocess.Popen[bytes] | None = None

    def processes(self) -> list[psutil.Process]:
        found = super().processes()
        if found and self.last is None:
            self.last = subprocess.Popen(["sleep", "600"], env={**os.environ, MARK: self.mark})
        return found


def test_kill_takes_what_starts_meanwhile(tmp_path: Path) -> None:
    process = Fertile(tmp_path, SERVE)
    process.spawn()
    process.kill()
    assert process.last is not None
    assert process.last.wait() == -signal.SIGKILL


@pytest.mark.parametrize("end", ["stop", "start"])
def test_children_that_outlive_their_parent_are_ended_by_stop_and_by_the_next_start(script: Make, end: str) -> None:
    process = script(PARENT)
    process.start()
    _orphan(process)
    orphans = process.processes()
    assert len(orphans) == 2
    began_at = time.monotonic()
    getattr(process, end)()
    assert not set(orphans) & set(process.processes())
    assert process.is_running() is (end == "start")
    assert time.monotonic() - began_at < 5  # nothing is left that could end in order, so nobody waits for that


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_a_paused_process_can_be_ended(script: Make, end: str) -> None:
    process = script()
    process.start()
    process.pause()
    started_at = time.monotonic()
    getattr(process, end)()
    assert process.processes() == []
    assert time.monotonic() - started_at < 5


@pytest.mark.parametrize(
    ("end", "code"), [("raise SystemExit(3)", "process-ended"), ("import time; time.sleep(600)", "process-not-ready")]
)
def test_a_start_that_fails_shows_the_end_of_the_log(script: Make, end: str, code: str) -> None:
    process = script(f"print('the reason', flush=True); {end}")
    process.start_timeout_s = 1
    with raises(code, "script.log:\nthe reason"):
        process.start()


def test_the_log_is_kept_over_restarts_and_its_tail_is_short(script: Make) -> None:
    process = script(f"print('started', flush=True); {SERVE}")
    process.start()
    process.kill()
    process.start()
    assert process.tail() == "started\nstarted"
    assert process.tail(1) == "started"


def test_a_child_that_has_ended_is_no_zombie(script: Make) -> None:
    before = psutil.Process().children()  # of other tests
    killed, ended = script(), script("pass", name="ended")
    killed.start()
    first = main(killed).pid
    killed.kill()
    assert not psutil.pid_exists(first)
    ended.spawn()
    wait_for("the process to end", lambda: not ended.is_running(), timeout_s=60)
    ended.spawn()
    ended.kill()
    ours = [one for one in psutil.Process().children() if one not in before]
    assert not [one for one in ours if one.status() == psutil.STATUS_ZOMBIE]
