"""The soak without the parts that it breaks: nemesis, keeper, a run that breaks off, clients, page."""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from click.testing import CliRunner

from outbox.base import project
from outbox.base.errors import Failure
from outbox.base.settings import Settings, load
from outbox.base.wait import nothing, wait_for
from outbox_lab.commands.soak import soak
from outbox_lab.soak import Request, clients, domain, nemesis, run, testbed
from outbox_lab.soak.clients import Clients
from outbox_lab.soak.faults import FAULTS
from outbox_lab.soak.history import SET_UP, Checked, Death, Problem, Recorder
from outbox_lab.soak.nemesis import Fault, Nemesis, Strike, Watch, wait_or_not_fired
from outbox_lab.soak.record import Folder, Plan
from outbox_lab.soak.testbed import LINKS
from outbox_lab.stack.process import Process
from outbox_lab.testing import chosen_seed
from outbox_lab.testing.failures import raises
from tests.support.paths import ROOT

# The nemesis ---------------------------------------------------------------------------------------------------------


def test_a_seed_decides_the_order_and_every_fault_comes_before_one_comes_again() -> None:
    seed, count = chosen_seed(), len(FAULTS)
    first, second = (list(islice(nemesis.draws(seed, FAULTS, 5), 2 * count)) for _ in range(2))
    assert first == second != list(islice(nemesis.draws(seed + 1, FAULTS, 5), 2 * count))
    assert {one.fault for one in first[:count]} == {one.fault for one in first[count:]} == set(FAULTS)
    assert {one.is_beside for one in first} == {False, True}, "some begin beside others, and some alone"


def test_a_fault_breaks_parts_and_needs_others() -> None:
    for name, fault in FAULTS.items():
        assert {*fault.parts, *fault.needs} <= set(testbed.PARTS), name
        assert not {*fault.parts} & {*fault.needs}, name


@pytest.fixture
def unstarted(tmp_path: Path) -> testbed.Testbed:
    """A testbed without sinks, of which nothing runs."""
    return testbed.Testbed(load(tmp_path, environment=False), [])


def miss(_: Strike) -> str:
    return wait_or_not_fired("somebody to be there", lambda: None, timeout_s=0.01)


def fail_to_heal(_: Strike) -> None:
    raise RuntimeError("it stays broken")


QUICK = Fault("quick", "Happens, and is over.", lambda _: "it happened", parts=("service",))
LONG = replace(QUICK, name="long", lasts_s=(600.0, 600.0))


def broken(
    bed: testbed.Testbed, *faults: Fault, duration_s: float = 0.5, pause_s: float = 0.02, watch: Watch = nothing
) -> Nemesis:
    """The nemesis after a run with these faults."""
    breaker = Nemesis(bed, {one.name: one for one in faults}, chosen_seed(), print)
    breaker.run(duration_s, pause_s, watch)
    return breaker


def test_no_fault_begins_after_the_deadline(unstarted: testbed.Testbed) -> None:
    slow = replace(QUICK, inject=lambda _: f"it happened {threading.Event().wait(0.5)}")
    breaker = broken(unstarted, slow, duration_s=0.7, pause_s=0)
    assert all(one.fired_s < 0.7 and one.is_healed for one in breaker.injections)
    assert 1 <= len(breaker.injections) <= 2
    assert not broken(unstarted, QUICK, duration_s=0.1, pause_s=10).injections, "there was no time for one"


@pytest.mark.parametrize(
    ("other", "evidence"),
    [
        (replace(QUICK, name="other", is_possible=lambda _: False), {"quick": True}),
        (replace(QUICK, name="other", inject=miss), {"quick": True, "other": False}),
    ],
    ids=["impossible", "missed"],
)
def test_a_fault_that_does_not_happen(unstarted: testbed.Testbed, other: Fault, evidence: dict[str, bool]) -> None:
    """A fault that could not happen is left out. A fault that should have happened has no evidence."""
    assert {one.fault: bool(one.evidence) for one in broken(unstarted, QUICK, other).injections} == evidence


def test_the_watch_ends_a_run_and_what_lasts_then_is_not_unhealable(unstarted: testbed.Testbed) -> None:
    lasting, said = list[str](), list[str]()

    def watch() -> None:
        if breaker.lasting and said:
            lasting.extend(breaker.lasting)
            raise ValueError("a client has died")

    breaker = Nemesis(unstarted, {"long": replace(LONG, heal=fail_to_heal)}, chosen_seed(), said.append)
    with pytest.raises(ValueError, match="a client has died"):
        breaker.run(duration_s=60, pause_s=0.02, watch=watch)
    assert [(one.evidence, one.is_healed, one.is_broken_off) for one in breaker.injections] == [
        ("it happened", False, True)
    ]
    assert (lasting, breaker.lasting) == (["long"], [])


# The keeper sees the ends of processes, even if another part restarts them -------------------------------------------

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
    wait_for("the child", lambda: len(run.leaders({one.mark}).get(one.mark, ())) == 2, timeout_s=120)
    yield one
    one.kill()


@pytest.mark.parametrize("is_started_again", [False, True])
def test_a_process_that_ends_is_noted_once_between_two_looks(process: Process, is_started_again: bool) -> None:
    deaths: list[Death] = []
    watch = run.Watch({process.mark: process}, deaths)
    watch()
    child = run.leaders({process.mark})[process.mark][1]
    psutil.Process(child).kill()
    wait_for("the child to end", lambda: len(run.leaders({process.mark})[process.mark]) == 1, timeout_s=120)
    watch()
    assert not deaths
    process.kill()
    if is_started_again:
        process.spawn()
    watch()
    watch()
    [death] = deaths
    assert (death.process, death.part) == ("sinks-1", "sinks")
    assert death.alive_s is not None
    assert 0 <= death.alive_s < death.at_s


# A run that breaks off -----------------------------------------------------------------------------------------------

LOST = Checked("before sink-rewound", problems=[Problem("events-lost", "1 event lost")])


@pytest.mark.parametrize("error", [Failure("Kafka is unavailable"), KeyboardInterrupt()], ids=["failure", "signal"])
def test_a_run_that_breaks_off_is_stopped_and_judged_by_what_there_is(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, done = load(tmp_path, environment=False), list[str]()

    def start(_: object) -> None:
        raise error

    unstartable = SimpleNamespace(settings=settings, checks=[LOST], start=start, stop=lambda: done.append("stopped"))
    monkeypatch.setattr(run, "Testbed", lambda *_: unstartable)
    plan = Plan(1, 60.0, 30.0, 5.0, exactly_once=True, faults=["kafka-killed"])
    of: Any = SimpleNamespace(sinks=(("orders",),))
    if isinstance(error, Failure):
        found = run.soak(settings, of, plan, {}, Folder(tmp_path), done.append)
        # A check has found a loss before.
        assert (found.result, found.why_unknown, done) == ("invalid", "Kafka is unavailable", ["stopped"])
        assert json.loads((tmp_path / "verdict.json").read_text())["result"] == "invalid"
        assert LOST.when in (tmp_path / "checks.json").read_text()
    else:
        with pytest.raises(KeyboardInterrupt):
            run.soak(settings, of, plan, {}, Folder(tmp_path), done.append)
        assert "interrupted" in done[0]
        assert done[1:] == ["stopped"]
        assert not (tmp_path / "verdict.json").exists()


# Clients, against a service that is a few lines of HTTP --------------------------------------------------------------


class Service(BaseHTTPRequestHandler):
    """Answers each request with its body. It refuses a key that had another body."""

    bodies: dict[str, bytes]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        is_same = self.bodies.setdefault(self.headers["Idempotency-Key"], body) == body
        self.send_response(201 if is_same else 409)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


class Orders:
    """Orders, each of another number of pieces."""

    def __init__(self) -> None:
        self.count = 0
        self.answers: list[Any] = []

    def set_up(self, send: Callable[[Sequence[Request]], list[Any]]) -> None:
        send([Request("order", "/orders", {"pieces": 0}, (201,))])

    def plan(self) -> Request:
        self.count += 1
        return Request("order", "/orders", {"pieces": self.count}, (201,))

    def answered(self, request: Request, status: int, body: Any) -> None:
        assert (status, body) == (201, request.body)
        self.answers.append(body)


@pytest.fixture
def settings(tmp_path: Path) -> Iterator[Settings]:
    """The settings of a client of the service, which runs."""
    handler = type("Handler", (Service,), {"bodies": {}})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
        yield load(tmp_path, environment=False).replace(service_bind=f"127.0.0.1:{server.server_port}")
        server.shutdown()


def test_old_keys_are_reused_for_the_same_and_another_request(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "REUSED", 1.0)
    monkeypatch.setattr(clients, "REPEATED", 0.0)
    folder, domain = Folder(settings.home), Orders()
    with closing(Recorder(folder.history_file)) as recorder:
        one = Clients(settings, domain, recorder, rate=2_000, seed=1)  # type: ignore[arg-type]
        one.set_up()
        with one.sending():
            wait_for("the clients", lambda: domain.count > 60, timeout_s=60, needs=one.require_running)
    found = folder.history
    assert [one.body for one in found.attempts if one.client == SET_UP] == [{"pieces": 0}]
    again = [one for operation in found.operations.values() for one in operation.attempts[1:]]
    assert len(again) > 10
    assert {one.status for one in again} == {201}
    assert found.misuses
    assert {one.status for one in found.misuses} == {409}
    assert len(domain.answers) >= 60, "the domain hears of what it has planned"


# docs/soak.md, and a project without a domain ------------------------------------------------------------------------

ROW = re.compile(r"^\| `([\w-]+)` \| (.+) \|$", re.MULTILINE)


def test_the_page_lists_every_fault_as_the_command_does() -> None:
    page = (ROOT / "docs" / "soak.md").read_text()
    listed: dict[str, str] = {}
    for name, summary in ROW.findall(page):
        listed |= dict.fromkeys([name.replace("LINK", link) for link in LINKS] if "LINK" in name else [name], summary)
    known = {name: fault.summary for name, fault in FAULTS.items()}
    assert listed == known
    done = CliRunner().invoke(soak, ["--list"])
    assert dict(line.split(maxsplit=1) for line in done.output.splitlines()) == known
    assert [link for link in LINKS if f"`{link}`" not in page] == []


def test_what_is_wrong_with_a_project_is_said_and_nothing_is_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.outbox]\nsoak = 'smallest:Domain'\n")
    monkeypatch.setenv(project.VARIABLE, str(tmp_path))
    for words, code in (
        (["--faults", "kafka-killed,nothing-*"], "fault-unknown"),
        (["--seed", "1"], "soak-domain-missing"),
    ):
        with raises(code):
            CliRunner().invoke(soak, words, catch_exceptions=False)
    (tmp_path / "smallest.py").write_text(
        "class Domain:\n    sinks = ('orders',)\n    def __init__(self, seed): pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with raises("soak-domain-wrong"):  # it does not group its sinks
        domain.load(1)
    assert not (tmp_path / ".outbox").exists()
