"""The process controller, waits, ports and signals of the embedded stack, on small real processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil
import pytest

from outbox.base import wait
from outbox.base.settings import SECRET_NAMES, load, variable
from outbox.base.wait import timeout_scale, wait_for
from outbox_lab.stack import ports
from outbox_lab.stack.command import Command, service, sink
from outbox_lab.stack.interrupt import SIGNALS
from outbox_lab.stack.process import MARK, Process
from outbox_lab.testing.failures import raises

SERVE = "import time, pathlib; pathlib.Path('ready').touch(); time.sleep(600)"
DEAF = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SERVE}"
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


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_a_paused_process_can_be_ended_and_its_log_is_kept(script: Make, end: str) -> None:
    process = script(f"print('started', flush=True); {SERVE}")
    for _ in range(2):
        process.start()
        process.pause()
        started_at = time.monotonic()
        getattr(process, end)()
        assert process.processes() == []
        assert time.monotonic() - started_at < 5
    assert (process.tail(), process.tail(1)) == ("started\nstarted", "started")


@pytest.mark.parametrize("end", ["stop", "start"])
def test_children_that_outlive_their_parent_are_ended_by_stop_and_by_the_next_start(script: Make, end: str) -> None:
    process = script(PARENT)
    process.start()
    wait_for("parent and children", lambda: len(process.processes()) == 3, timeout_s=5)
    main(process).kill()
    wait_for("the parent to be gone", lambda: not process.is_running(), timeout_s=5)
    orphans = process.processes()
    assert len(orphans) == 2
    began_at = time.monotonic()
    getattr(process, end)()
    assert not set(orphans) & set(process.processes())
    assert process.is_running() is (end == "start")
    assert time.monotonic() - began_at < 5  # nothing is left that could end in order, so nobody waits for that


@pytest.mark.parametrize(
    ("end", "code"), [("raise SystemExit(3)", "process-ended"), ("import time; time.sleep(600)", "process-not-ready")]
)
def test_a_start_that_fails_shows_the_end_of_the_log(script: Make, end: str, code: str) -> None:
    process = script(f"print('the reason', flush=True); {end}")
    process.start_timeout_s = 1
    with raises(code, "script.log:\nthe reason"):
        process.start()


# Waiting ----------------------------------------------------------------------------------------------------------


IN_THREAD = f"""
import time
from {wait.__name__} import in_thread

in_thread("apply", time.sleep, 3600)
try:
    in_thread("apply", exit, 3).result()
except SystemExit as error:
    print("seen", error)
"""


def test_the_first_true_answer_is_returned_and_an_exception_ends_the_wait() -> None:
    answers = iter([None, "", 0, "here"])
    assert wait_for("an answer", lambda: next(answers), timeout_s=5, poll_s=0) == "here"
    with pytest.raises(StopIteration):
        wait_for("nothing", lambda: next(answers), timeout_s=60)


@pytest.mark.parametrize("scale", [1, 3])
def test_it_ends_at_the_scaled_deadline_and_says_what_it_waited_for(
    monkeypatch: pytest.MonkeyPatch, scale: int
) -> None:
    monkeypatch.setenv("OUTBOX_TIMEOUT_SCALE", str(scale))
    started_at = time.monotonic()
    with raises("timeout", "the cows to come home", "the last answer was []"):
        wait_for("the cows to come home", lambda: [], timeout_s=0.1, poll_s=0.01)
    assert 0.1 * scale <= time.monotonic() - started_at < 2


@pytest.mark.parametrize("wrong", ["fast", "0", "-1", "nan"])
def test_a_wrong_multiplier_is_a_failure_that_names_the_variable(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    monkeypatch.setenv("OUTBOX_TIMEOUT_SCALE", wrong)
    with raises("settings-wrong", "OUTBOX_TIMEOUT_SCALE"):
        timeout_scale()


def test_a_call_that_never_returns_does_not_keep_the_process_and_any_exception_is_seen() -> None:
    done = subprocess.run([sys.executable, "-c", IN_THREAD], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "seen 3\n"), done.stderr


# Ports ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that somebody listens on."""
    with socket.socket() as server:
        server.bind((ports.LOOPBACK, 0))
        server.listen()
        yield server.getsockname()[1]


def test_preferred_ports_are_chosen_unless_another_stack_has_one_of_them(taken: int) -> None:
    [free] = ports.choose(0)
    assert (ports.is_free(free), ports.is_open(free)) == (True, False)
    assert (ports.is_free(taken), ports.is_open(taken)) == (False, True)
    assert ports.choose(free) == [free]
    chosen = ports.choose(taken, free)
    assert not set(chosen) & {taken, free}
    assert all(map(ports.is_free, chosen))


def test_reserved_port_is_not_chosen_before_its_server_listens() -> None:
    [free] = ports.choose(0)
    with ports.reserved(free) as first, ports.reserved(free, 0) as others:
        assert first == [free]
        assert free not in others
        with socket.create_server((ports.LOOPBACK, free)):
            assert ports.is_open(free)
    assert ports.choose(free) == [free]


def test_a_taken_port_is_a_failure_that_names_the_port_and_the_part(
    taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ports, "RELEASE_TIMEOUT_S", 0.2)
    with raises("port-taken", f"port {taken} of the broker", f"sport = :{taken}"):
        ports.require_free(taken, "the broker")


def test_a_port_in_time_wait_counts_as_free() -> None:
    # A stopped server leaves connections in TIME_WAIT for a minute; a restart must not fail because of them.
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((ports.LOOPBACK, 0))
        server.listen()
        port = server.getsockname()[1]
        client = socket.create_connection((ports.LOOPBACK, port))
        accepted, _ = server.accept()
        accepted.close()  # the server's end closes first, so that it is the one in TIME_WAIT
        client.recv(1)
        client.close()
    ports.require_free(port, "it")


# Signals: the first Ctrl-C ends only the faults; any other ends the run, and nothing disturbs the stop ------------


STOPS = """
import os, signal, subprocess, sys
from outbox_lab.stack import interrupt

def send(name):
    os.kill(os.getpid(), getattr(signal, name))

interrupt.once()
try:
    send(sys.argv[1])
    print("goes on")
except KeyboardInterrupt:
    for one in interrupt.SIGNALS:
        os.kill(os.getpid(), one)
    started = subprocess.run([sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"])
    print("stops everything", started.returncode)
"""


def said_by(program: str, *arguments: str, ignored: str | None = None) -> str:
    """Output of a process, which begins with one signal ignored and the usual handlers of the others."""
    usual = {one.name: "SIG_DFL" for one in SIGNALS} | {"SIGINT": "default_int_handler"}  # whatever ours are
    handlers = usual | ({ignored: "SIG_IGN"} if ignored else {})
    begin = "import signal" + "".join(f"; signal.signal(signal.{one}, signal.{how})" for one, how in handlers.items())
    command = [sys.executable, "-c", f"{begin}\n{program}", *arguments]
    return subprocess.check_output(command, text=True, timeout=300).strip()


@pytest.mark.parametrize("name", [one.name for one in SIGNALS])
def test_first_signal_ends_a_run_and_later_ones_are_ignored(name: str) -> None:
    said = said_by(STOPS, name)
    assert said == f"stops everything {-signal.SIGTERM}", "what it starts meanwhile can be stopped"


HANGS_UP = """
import fcntl, signal, sys, termios
from pathlib import Path
from outbox_lab.stack import interrupt

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ours may be ignored, as after nohup
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # whose end is a SIGHUP
interrupt.once()
try:
    print("runs", flush=True)
    Path(sys.argv[2]).touch()  # not within the write any more, which the end of the terminal would fail
    signal.pause()
except KeyboardInterrupt:
    print("stops", flush=True)
    Path(sys.argv[1]).write_text("stopped everything")
"""


def test_a_command_whose_terminal_is_gone_stops_everything(tmp_path: Path) -> None:
    """Its output raises no error meanwhile."""
    ours, its = os.openpty()
    command = [sys.executable, "-c", HANGS_UP, str(tmp_path / "said"), str(tmp_path / "waits")]
    with subprocess.Popen(command, stdin=its, stdout=its, stderr=subprocess.PIPE, start_new_session=True) as process:
        os.close(its)
        assert os.read(ours, 100).startswith(b"runs")
        wait_for("the command to wait", (tmp_path / "waits").exists, timeout_s=60)
        os.close(ours)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, b"")
    assert (tmp_path / "said").read_text() == "stopped everything"


WAITS = """
import threading
from outbox.base.errors import Failure
from outbox_lab.stack import interrupt
from outbox_lab.soak.nemesis import wait_or_not_fired

interrupt.once()
codes = []

def wait():
    try:
        wait_or_not_fired("what never comes", lambda: waits.set(), timeout_s=600)
    except Failure as failure:
        codes.append(failure.code)

waits = threading.Event()
thread = threading.Thread(target=wait)
thread.start()
waits.wait()
try:
    signal.raise_signal(signal.SIGTERM)
except KeyboardInterrupt:
    thread.join()
    print(codes)
"""


def test_a_signal_ends_the_waits_of_faults_too() -> None:
    assert said_by(WAITS) == "['interrupted']"


ENDS_EARLY = """
import signal, sys
from outbox_lab.stack import interrupt

interrupt.once()
said = []
try:
    with interrupt.asked_to_end(lambda: said.append("ends early")):
        for name in sys.argv[2:]:
            signal.raise_signal(getattr(signal, name))
    signal.raise_signal(getattr(signal, sys.argv[1]))
except KeyboardInterrupt:
    said.append("stops")
print(*said)
"""


@pytest.mark.parametrize(
    ("within", "after", "said"),
    [
        ([], "SIGINT", "stops"),
        (["SIGINT"], "SIGINT", "ends early stops"),
        (["SIGINT", "SIGINT"], "SIGCHLD", "ends early stops"),
        (["SIGTERM"], "SIGINT", "stops"),
        (["SIGHUP"], "SIGINT", "stops"),
    ],
)
def test_the_first_ctrl_c_ends_the_faults_and_a_second_one_the_run(within: list[str], after: str, said: str) -> None:
    assert said_by(ENDS_EARLY, after, *within) == said


def test_a_run_that_ignores_a_signal_is_not_ended_by_it() -> None:
    assert said_by(STOPS, "SIGHUP", ignored="SIGHUP") == "goes on"
    assert not said_by(ENDS_EARLY, "SIGINT", "SIGINT", ignored="SIGINT")
