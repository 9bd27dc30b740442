"""The process controller, waits and signals of the embedded stack, on small real processes. `outbox down`, and
`outbox dev`.
"""

from __future__ import annotations

import json
import os
import pwd
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outbox.base import wait
from outbox.base.settings import SECRET_NAMES, load, variable
from outbox.base.wait import wait_for
from outbox.events import catalog
from outbox_lab.stack import development, stack
from outbox_lab.stack.command import Command, service, sink
from outbox_lab.stack.development import SCHEMA, Development, Shown
from outbox_lab.stack.interrupt import SIGNALS
from outbox_lab.stack.process import MARK, Process
from outbox_lab.stack.stack import Deployment
from outbox_lab.testing.command import outbox
from outbox_lab.testing.failures import raises
from tests.support.declared import declare, work_for

SERVE = "import time, pathlib; pathlib.Path('ready').touch(); time.sleep(600)"
DEAF = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SERVE}"


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


def test_a_command_gets_the_shell_s_variables_and_its_own_secrets_only(tmp_path: Path) -> None:
    settings = load(tmp_path, environment=False, **dict.fromkeys(SECRET_NAMES, "hush"))

    def given(one: Command) -> set[str]:
        assert one.inherits("AWS_SECRET_ACCESS_KEY")
        assert not one.inherits("OUTBOX_SERVICE_TOKEN")
        return {name for name, value in one.env().items() if value == "hush"}

    assert given(service(settings)) == {"OUTBOX_SOURCE_DB_APP_PASSWORD", "OUTBOX_SERVICE_TOKEN"}
    assert given(sink(settings, "any")) == {"OUTBOX_SINK_DB_WRITER_PASSWORD", "OUTBOX_KAFKA_PASSWORD"}
    assert given(Command("check", settings, ["check"])) == {variable(name) for name in SECRET_NAMES}


def test_stop_asks_first_and_kills_what_does_not_hear_it_after_its_time(script: Make) -> None:
    bye = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: (print('bye', flush=True), sys.exit()))"
    polite, deaf = script(f"{bye}; {SERVE}", "polite"), script(DEAF, "deaf")
    deaf.stop_timeout_s = 0.5
    for process in (polite, deaf):
        process.start()
        process.pause()
        began_at = time.monotonic()
        process.stop()
        assert process.processes() == []
    assert polite.tail() == "bye"
    assert time.monotonic() - began_at >= 0.5


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


def test_a_wait_ends_at_the_scaled_deadline_and_says_what_it_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBOX_TIMEOUT_SCALE", "3")
    started_at = time.monotonic()
    with raises("timeout", "the cows to come home", "the last answer was []"):
        wait_for("the cows to come home", lambda: [], timeout_s=0.1, poll_s=0.01)
    assert 0.3 <= time.monotonic() - started_at < 2


def test_a_call_that_never_returns_does_not_keep_the_process_and_any_exception_is_seen() -> None:
    done = subprocess.run([sys.executable, "-c", IN_THREAD], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "seen 3\n"), done.stderr


# Signals: the first Ctrl-C ends only the faults; any other ends the run, and nothing disturbs the stop ------------


SIGNALLED = """
import os, signal, subprocess, sys
from outbox_lab.stack import interrupt

interrupt.once()
said = []
try:
    with interrupt.asked_to_end(lambda: said.append("ends early")):
        for name in sys.argv[2:]:
            signal.raise_signal(getattr(signal, name))
    signal.raise_signal(getattr(signal, sys.argv[1]))
    said.append("goes on")
except KeyboardInterrupt:
    for one in interrupt.SIGNALS:
        os.kill(os.getpid(), one)
    started = subprocess.run([sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"])
    said.append(f"stops everything {started.returncode}")
print(*said)
"""
STOPS = f"stops everything {-signal.SIGTERM}"  # later signals are ignored, and what it starts meanwhile can be stopped
NAMES = [one.name for one in SIGNALS]


@pytest.mark.parametrize(
    ("within", "after", "ignored", "said"),
    [
        *(([], name, None, STOPS) for name in NAMES),
        *(([], name, name, "goes on") for name in NAMES),
        (["SIGINT"], "SIGINT", None, f"ends early {STOPS}"),
        (["SIGINT", "SIGINT"], "SIGCHLD", None, f"ends early {STOPS}"),
        (["SIGTERM"], "SIGINT", None, STOPS),
        (["SIGHUP"], "SIGINT", None, STOPS),
    ],
)
def test_the_first_ctrl_c_ends_the_faults_and_any_other_signal_the_run(
    within: list[str], after: str, ignored: str | None, said: str
) -> None:
    """The process begins with one signal ignored, and the usual handlers of the others."""
    usual = {one.name: "SIG_DFL" for one in SIGNALS} | {"SIGINT": "default_int_handler"}  # whatever ours are
    handlers = usual | ({ignored: "SIG_IGN"} if ignored else {})
    begin = "import signal" + "".join(f"; signal.signal(signal.{one}, signal.{how})" for one, how in handlers.items())
    command = [sys.executable, "-c", f"{begin}\n{SIGNALLED}", after, *within]
    assert subprocess.check_output(command, text=True, timeout=300).strip() == said


# `outbox down` says what it stops -----------------------------------------------------------------------------------


def down(home: Path) -> list[str]:
    """The lines that the command prints."""
    done = outbox("down", home=home)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_down_ends_stacks_in_folders_below_and_leaves_others_alone(script: Make, tmp_path: Path) -> None:
    """A home is the same by a link."""
    home = tmp_path / "home"
    places = {"service": home, "kafka": home / "tests", "connect": tmp_path / "other", "x": home / "../evil"}
    service, below, beside, stranger = (script(SERVE, name, place) for name, place in places.items())
    for process in (service, below, beside, stranger):
        process.start()
    service.pause()
    (tmp_path / "link").symlink_to("home")
    last = "2 parts are stopped; data stays until `outbox reset`"
    assert down(tmp_path / "link") == ["kafka: stopping", "service: stopping", last]
    assert not below.is_running()
    assert beside.is_running()
    assert stranger.is_running(), "its mark leads out of the home"


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


def test_lock_that_is_a_link_is_refused(tmp_path: Path) -> None:
    home, victim = tmp_path / "home", tmp_path / "victim"
    home.mkdir()
    victim.write_text("content")
    (home / "lock").symlink_to(victim)
    assert "lock" in outbox("down", home=home).stderr
    assert "lock" in outbox("up", "postgres", home=home).stderr
    assert victim.read_text() == "content"


# `outbox dev`: what it starts again, and the logs of its parts as they are shown --------------------------------------


class Part(Process):
    """A part that runs, or not, as the test says."""

    runs = True
    starts = 0

    def is_running(self) -> bool:
        return self.runs

    def is_ready(self) -> bool:
        return False

    def spawn(self) -> None:
        self.runs = True
        self.starts += 1

    def stop(self) -> None:
        self.runs = False


def developed(home: Path, sinks: Mapping[str, Part], monkeypatch: pytest.MonkeyPatch) -> Development:
    """`outbox dev` of these sinks, with parts that are models."""
    settings = load(home, environment=False)
    embedded: Any = SimpleNamespace(settings=settings, part=lambda name: Part(name, home), up=lambda **_: None)
    relay = SimpleNamespace(apply=lambda _: "created", status=lambda _: SimpleNamespace(mode="exactly-once"))
    monkeypatch.setattr(stack, "service", lambda _: Part("service", home))
    monkeypatch.setattr(stack, "lifecycle", relay)
    monkeypatch.setattr(development, "sink", lambda _, name: sinks[name])
    made = Development(Deployment(embedded), [*sinks], lambda *_: None)
    made.start()
    return made


def test_only_the_edited_sink_starts_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work_for(tmp_path / "project", monkeypatch)
    monkeypatch.setattr("outbox.migrations.migrate.migrate", lambda _: None)
    package = tmp_path / "project/stock/sinks"
    files = {name: [package / name] for name in ("orders", "sales", "unused")}
    files["sales"].append(package / "orders/projections")  # as a job may say
    for folder in (*files["orders"], *files["sales"], *files["unused"]):
        folder.mkdir(parents=True, exist_ok=True)
    monkeypatch.setattr(development, "sink_files", lambda: files)
    sinks = {name: Part(f"sink-{name}", tmp_path) for name in ("orders", "sales")}
    dev = developed(tmp_path / "home", sinks, monkeypatch)

    def edited(file: str) -> set[str]:
        before = {name: sink.starts for name, sink in sinks.items()}
        (package / file).touch()
        os.utime(package / file, ns=(time.monotonic_ns(),) * 2)
        dev.step()
        return {name for name, sink in sinks.items() if sink.starts > before[name]}

    assert edited("orders/job.py") == {"orders"}
    assert edited("orders/projections/states.sql") == {"orders", "sales"}
    assert edited("unused/job.py") == set()
    assert edited("helpers.py") == {"orders", "sales"}
    sinks["sales"].runs = False
    dev.step()
    assert edited("orders/job.py") == {"orders", "sales"}, "another's mistake may be why it is down"


def test_events_that_are_declared_meanwhile_are_applied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    applied: list[int] = []
    monkeypatch.setattr(
        "outbox.migrations.migrate.migrate", lambda of: applied.append(len(catalog.of_project(of).topics))
    )
    folder = work_for(tmp_path / "project", monkeypatch)
    declare(folder, "order")
    dev = developed(tmp_path / "home", {}, monkeypatch)
    declare(folder, "basket")
    dev.apply(SCHEMA)
    assert applied == [1, 2]


CODE = """
import json

def decide(text):
    try:
        return json.loads(text)
    except ValueError as error:
        raise RuntimeError("not an order") from error

decide("{")
"""


def record(level: str, **fields: object) -> str:
    return json.dumps({"timestamp": "2026-11-29T02:00:00Z", "level": level, "event": "happened", **fields})


@pytest.mark.parametrize("cut", [None, 3, 8])
def test_a_traceback_has_the_project_s_frames_in_however_many_pieces_it_comes(tmp_path: Path, cut: int | None) -> None:
    (tmp_path / "rules.py").write_text(CODE)
    command = [sys.executable, str(tmp_path / "rules.py")]
    traceback = subprocess.run(command, capture_output=True, text=True, check=False).stderr.splitlines()
    lines = ["before", *traceback, "after"]
    shown = Shown(tmp_path)
    pieces = [lines] if cut is None else [lines[:cut], lines[cut:]]
    found = [line for piece in pieces for line in shown.lines(piece)]
    assert (found[0], found[-1]) == ("before", "after")
    text = "\n".join(found)
    assert 'File "rules.py", line 6, in decide' in text
    assert "json.decoder.JSONDecodeError: " in text
    assert "json/decoder.py" not in text
    assert found.count("RuntimeError: not an order") == 1
    of_record = [*Shown(tmp_path).lines([record("error", exception="\n".join(traceback))])]
    assert of_record == ["ERROR happened", *found[1:-1]]


def test_records_below_a_warning_are_shown_if_asked_for(tmp_path: Path) -> None:
    lines = [record("info"), record("warning", sink="orders", in_s=2), "printed by the project"]
    noise = ["WARNING: Using incubator modules: jdk.incubator.vector"]
    quiet = ["WARNING happened sink=orders in_s=2", "printed by the project"]
    assert [*Shown(tmp_path).lines([*lines, *noise])] == quiet
    assert [*Shown(tmp_path, verbose=True).lines([*lines, *noise])] == ["INFO happened", *quiet, *noise]


def test_servers_show_warnings_and_errors_without_statements_and_frames(tmp_path: Path) -> None:
    log = """\
2026-11-29 02:00:00.123 UTC [1] LOG:  database system is ready
2026-11-29 02:00:00.124 UTC [1] app@shop ERROR:  division by zero
2026-11-29 02:00:00.124 UTC [1] app@shop STATEMENT:  SELECT 'hush',
    1 / 0
2026-11-29T02:00:00,125 INFO  Connect: started
2026-11-29T02:00:00,126 ERROR Connect: failed
java.lang.RuntimeException: why
\tat org.apache.kafka.Connect.main(Connect.java:1)
Caused by: java.io.IOException: the cause
\t... 3 more
""".splitlines()
    assert [line.rpartition(" UTC [1] ")[2] for line in Shown(tmp_path).lines(log)] == [
        "app@shop ERROR:  division by zero",
        "2026-11-29T02:00:00,126 ERROR Connect: failed",
        "java.lang.RuntimeException: why",
        "Caused by: java.io.IOException: the cause",
    ]
    assert len([*Shown(tmp_path, verbose=True).lines(log)]) == len(log)
