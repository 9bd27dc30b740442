"""The soak without the parts that it breaks: nemesis, faults, proxies, keeper, clients, commands, page."""

from __future__ import annotations

import json
import os
import random
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, nullcontext
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
from outbox.events import catalog
from outbox.events.schema import Rejection
from outbox.relay.connectors import Connector
from outbox.sink.decoding import records
from outbox.sink.decoding.decoder import now_ms
from outbox_lab.commands.soak import soak
from outbox_lab.soak import Request, clients, domain, nemesis, run, testbed
from outbox_lab.soak.clients import Clients
from outbox_lab.soak.faults import FAULTS, operations
from outbox_lab.soak.history import SET_UP, Checked, Death, History, Problem, Recorder
from outbox_lab.soak.nemesis import Fault, Nemesis, NotFired, Strike, Watch, wait_or_not_fired
from outbox_lab.soak.proxy import Proxy
from outbox_lab.soak.record import Folder, Plan
from outbox_lab.soak.testbed import LINKS, PREFIX, Done
from outbox_lab.stack import interrupt, ports
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
def unstarted(tmp_path: Path) -> Iterator[testbed.Testbed]:
    """A testbed with its links and without sinks, of which nothing runs."""
    made = testbed.Testbed(load(tmp_path, environment=False), [])
    made.stack.links = {name: Proxy(name, ports.choose(0)[0]) for name in LINKS}
    yield made
    for link in made.links.values():
        link.close()


def miss(_: Strike) -> str:
    return wait_or_not_fired("somebody to be there", lambda: None, timeout_s=0.01)


def look_at_broker(strike: Strike) -> str:
    with strike.testbed.free("kafka") as is_free:
        return "" if is_free else "the broker was held"


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


def test_what_a_fault_breaks_is_kept_apart_from_what_it_needs(unstarted: testbed.Testbed) -> None:
    breaker = broken(unstarted, replace(QUICK, inject=look_at_broker, needs=("kafka",)), duration_s=0.2, pause_s=0)
    assert {(one.evidence, one.parts) for one in breaker.injections} == {("the broker was held", ("service",))}


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


def test_run_ended_early_heals_lasting_faults_and_begins_no_more(unstarted: testbed.Testbed) -> None:
    def watch() -> None:
        if breaker.lasting:
            breaker.end()

    breaker = Nemesis(unstarted, {"long": LONG}, chosen_seed(), print)
    breaker.run(duration_s=600, pause_s=0.02, watch=watch)
    [one] = breaker.injections
    assert (one.evidence, one.is_healed, one.is_broken_off) == ("it happened", True, False)


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


# Faults --------------------------------------------------------------------------------------------------------------


def injected(name: str, bed: testbed.Testbed) -> str:
    """The evidence of a fault that was injected."""
    return FAULTS[name].inject(Strike(FAULTS[name], bed, random.Random(chosen_seed())))  # noqa: S311


@pytest.mark.parametrize(
    ("code", "sink", "is_expected"),
    [("malformed-records", None, True), ("events-lost", None, False), ("sink-drift", "unknown", False)],
)
def test_check_may_find_what_other_faults_cause(
    unstarted: testbed.Testbed, monkeypatch: pytest.MonkeyPatch, code: str, sink: str | None, is_expected: bool
) -> None:
    finding = {"code": code, "sink": sink, "message": "…"}
    output = json.dumps({"findings": [finding], "topics": [], "total": {"duplicates": 0}})
    monkeypatch.setattr(unstarted, "run", lambda *_, **__: Done(1, output, f"{PREFIX}problems-found"))
    with nullcontext() if is_expected else pytest.raises(NotFired, match=code):
        injected("check-incremental", unstarted)


def test_a_prune_that_is_refused_for_a_while_is_run_until_it_succeeds(
    unstarted: testbed.Testbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = [
        Done(1, "", f"outbox: it failed\n{PREFIX}{code}") for code in ("events-not-on-topic", "kafka-unavailable")
    ]
    ends = iter([*failed, Done(0, "deleted 3 events\n", "")])
    monkeypatch.setattr(unstarted, "run", lambda *_, **__: next(ends))
    monkeypatch.setattr(nemesis, "AGAIN_S", 0.0)
    assert injected("prune", unstarted) == "outbox prune: deleted 3 events"


def test_what_is_not_there_is_not_broken(unstarted: testbed.Testbed) -> None:
    possible = {name for name, fault in FAULTS.items() if fault.is_possible(unstarted)}
    assert "sinks-killed" in possible
    of_sinks = {"handlers-killed-in-call", "sinks-engine-changed", "sinks-spark-killed", "sinks-killed-in-topic"}
    assert possible.isdisjoint(of_sinks)


@pytest.fixture
def capturing(tmp_path: Path) -> testbed.Testbed:
    """A testbed with the sink of a captured table, and nothing that runs."""
    return testbed.Testbed(load(tmp_path, environment=False), [["dedup", "changes"]])


def test_a_captured_table_has_its_connector_and_no_rebuild_from_the_source(
    unstarted: testbed.Testbed, capturing: testbed.Testbed
) -> None:
    assert [one.kind for one in unstarted.connectors] == ["outbox"]
    assert [one.kind for one in capturing.connectors] == ["outbox", "changes"]
    assert operations.rebuildable(capturing, "topic") == ["dedup", "changes"]
    assert operations.rebuildable(capturing, "source") == ["dedup"]


@pytest.mark.parametrize(
    "make",
    [
        operations.foreign_records,
        operations.malformed_records,
        operations.huge_records,
        operations.records_of_decades,
    ],
)
def test_a_hostile_record_is_invalid(capturing: testbed.Testbed, make: operations.Make) -> None:
    made = 0
    for topic in catalog.of_project(capturing.settings).topics:
        for sink in capturing.readers(topic):
            for one in make(capturing, topic, random.Random(chosen_seed())):  # noqa: S311
                headers = [(name, value) for name, value in one.headers.items() if value is not None]
                found = sink.decoders[topic].record(records.Record(one.key, headers, one.value, now_ms()))
                is_skipped = not operations.asks_for(capturing, sink, topic, one)
                assert isinstance(found, Rejection) or is_skipped, found
                made += not is_skipped
    assert made


@pytest.mark.parametrize(
    ("code", "exactly_once", "done"),
    [
        ("slot-ahead", False, ["apply", "remove changes", "apply"]),
        ("slot-ahead", True, ["apply"]),
        ("timeout", False, ["apply"]),
    ],
)
def test_slot_ahead_at_least_once_begins_with_a_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, exactly_once: bool, done: list[str]
) -> None:
    settings = load(tmp_path, environment=False, exactly_once=exactly_once)
    made = testbed.Testbed(settings, [["changes"]])
    monkeypatch.setattr(made.stack, "through", lambda *_: settings)
    called: list[str] = []

    def apply(*_: object) -> str:
        called.append("apply")
        if called == ["apply"]:
            raise Failure("it does not go on", code=code)
        return "created"

    def remove(_: Settings, connector: Connector, *, drop_slot: bool) -> None:
        assert drop_slot
        called.append(f"remove {connector.kind}")

    monkeypatch.setattr("outbox.relay.lifecycle.apply", apply)
    monkeypatch.setattr("outbox.relay.lifecycle.remove", remove)
    with nullcontext() if len(done) > 1 else raises(code):
        made.apply_one(made.captures[0])
    assert called == done


# The proxy between two parts ---------------------------------------------------------------------------------------

TIMEOUT_S = 5


def serve(listener: socket.socket) -> None:
    """Send back what comes, on any number of connections."""

    def echo(connection: socket.socket) -> None:
        with connection:
            while data := connection.recv(1000):
                connection.sendall(data)

    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=echo, args=[connection], daemon=True).start()


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    """A proxy in front of an echo."""
    listener = socket.create_server((ports.LOOPBACK, 0))
    threading.Thread(target=serve, args=[listener], daemon=True).start()
    made = Proxy("client-echo", listener.getsockname()[1])
    yield made
    made.close()
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def client(proxy: Proxy) -> socket.socket:
    return socket.create_connection((ports.LOOPBACK, proxy.port), timeout=TIMEOUT_S)


def echoed(connection: socket.socket, text: bytes = b"hello") -> bytes:
    connection.sendall(text)
    return connection.recv(1000)


def is_closed(connection: socket.socket) -> bool:
    """Whether the other side ends the connection, gently or not."""
    try:
        return not connection.recv(1)
    except ConnectionError:
        return True


@pytest.fixture
def connection(proxy: Proxy) -> Iterator[socket.socket]:
    """A connection through the proxy, in use."""
    with closing(client(proxy)) as made:
        assert echoed(made) == b"hello"
        yield made


def test_a_cut_ends_connections_and_refuses_new_ones_until_healed(proxy: Proxy, connection: socket.socket) -> None:
    wait_for("the answer to be counted", lambda: proxy.bytes == 2 * len(b"hello"), timeout_s=TIMEOUT_S)
    assert proxy.cut() == proxy.affected == 1
    assert is_closed(connection)
    with pytest.raises(ConnectionRefusedError):
        client(proxy)
    proxy.heal()
    with closing(client(proxy)) as another:
        assert echoed(another) == b"hello"


def test_a_half_open_link_lets_nothing_pass_and_loses_nothing(proxy: Proxy, connection: socket.socket) -> None:
    assert proxy.hold() == 1
    assert proxy.affected == 0, "nothing has come through it since"
    connection.settimeout(0.2)
    connection.sendall(b"again")
    with pytest.raises(TimeoutError):
        connection.recv(1)
    assert proxy.affected == 1
    with closing(client(proxy)):  # it is accepted
        proxy.heal()
    connection.settimeout(TIMEOUT_S)
    assert connection.recv(1000) == b"again"


def test_a_slow_link_delays_what_passes_both_ways(proxy: Proxy, connection: socket.socket) -> None:
    proxy.delay(0.01)
    assert proxy.affected == 0
    assert echoed(connection) == b"hello"
    assert proxy.affected == 2


def test_requests_that_are_held_never_arrive_once_the_link_is_cut() -> None:
    with (
        closing(socket.create_server((ports.LOOPBACK, 0))) as listener,
        closing(Proxy("client-server", listener.getsockname()[1])) as proxy,
        closing(client(proxy)) as connection,
    ):
        server, _ = listener.accept()
        with closing(server):
            proxy.hold(answers=False)
            server.sendall(b"answer")
            assert connection.recv(1000) == b"answer"
            connection.sendall(b"late")
            wait_for("the request", lambda: proxy.affected == 1, timeout_s=TIMEOUT_S)
            proxy.cut()
            proxy.heal()
            assert is_closed(server)


def test_a_connection_that_is_made_during_a_cut_does_not_survive_it(proxy: Proxy) -> None:
    for _ in range(100):
        with closing(client(proxy)) as connection:
            proxy.cut()
            assert is_closed(connection)
            proxy.heal()


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


def watching(process: Process) -> tuple[run.Watch, list[Death]]:
    deaths: list[Death] = []
    return run.Watch({process.mark: process}, deaths), deaths


@pytest.mark.parametrize("is_started_again", [False, True])
def test_a_process_that_ends_is_noted_once_between_two_looks(process: Process, is_started_again: bool) -> None:
    watch, deaths = watching(process)
    watch()
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


def test_a_child_that_ends_is_no_death(process: Process) -> None:
    watch, deaths = watching(process)
    watch()
    parent, child = run.leaders({process.mark})[process.mark]
    assert parent == process.pid()
    psutil.Process(child).kill()
    wait_for("the child to end", lambda: len(run.leaders({process.mark})[process.mark]) == 1, timeout_s=120)
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

    run.attempt(look, said.append)
    run.attempt(lambda: said.append("it looks again"), said.append)
    assert "no table of processes" in said[0]
    assert said[1:] == ["it looks again"]


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


# Commands of an operator ---------------------------------------------------------------------------------------------


def command(home: Path, *words: str) -> Done:
    return testbed.run_command(load(home, environment=False), words)


def test_only_an_expected_failure_has_a_code(tmp_path: Path) -> None:
    done = command(tmp_path, "connect", "render")
    assert (done.status, done.code, bool(done.output)) == (0, "", True)
    done = command(tmp_path, "sink", "nothing")
    assert (done.status, done.code) == (1, "sink-unknown")
    assert "nothing" in done.end
    assert not Done(1, "", "Traceback (most recent call last):\nKeyError: 1\n").code


def test_a_terminal_interrupts_no_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(testbed, "CODED", "import os; print(os.getpgid(0))")
    assert int(command(tmp_path, "check").output) != os.getpgid(0)


def test_a_signal_that_ends_the_run_ends_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = tmp_path / "started"
    monkeypatch.setattr(testbed, "CODED", f"open({str(started)!r}, 'w').write('x'); import time; time.sleep(600)")
    monkeypatch.setattr(testbed, "LOOK_S", 0.05)

    def require_none() -> None:
        if started.exists():
            raise Failure("the run was ended")

    monkeypatch.setattr(interrupt, "require_none", require_none)
    with pytest.raises(Failure, match="ended"):
        command(tmp_path, "check")


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

    def __init__(self, ends_after: int = 10**6) -> None:
        self.ends_after, self.count = ends_after, 0
        self.answers: list[Any] = []

    def set_up(self, send: Callable[[Sequence[Request]], list[Any]]) -> None:
        send([Request("order", "/orders", {"pieces": 0}, (201,))])

    def plan(self) -> Request:
        self.count += 1
        if self.count > self.ends_after:
            raise ValueError("no order is left")
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


def sent(settings: Settings, domain: Any, until: Callable[[], bool]) -> History:
    """The history of clients that send until something is so, or one of them ends."""
    folder = Folder(settings.home)
    with closing(Recorder(folder.history_file)) as recorder:
        one = Clients(settings, domain, recorder, rate=2_000, seed=1)
        one.set_up()
        with one.sending():
            wait_for("the clients", until, timeout_s=60, needs=one.require_running)
    return folder.history


def test_a_client_that_ends_ends_the_run(settings: Settings) -> None:
    with raises("soak-client-ended"):
        sent(settings, Orders(ends_after=20), lambda: False)


def test_clients_go_on_until_there_are_answers_or_for_a_while(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "ANSWERED_TIMEOUT_S", 60.0)
    with closing(Recorder(settings.home / "history.jsonl")) as recorder:
        one = Clients(settings, Orders(), recorder, rate=2_000, seed=1)  # type: ignore[arg-type]
        with one.sending():
            before = recorder.acknowledged
            one.wait_answered()
            assert recorder.acknowledged > before
        monkeypatch.setattr(clients, "ANSWERED_TIMEOUT_S", 0.01)
        one.wait_answered()


def test_old_keys_are_reused_for_the_same_and_another_request(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "REUSED", 1.0)
    monkeypatch.setattr(clients, "REPEATED", 0.0)
    domain = Orders()
    found = sent(settings, domain, lambda: domain.count > 60)
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


@pytest.fixture
def without_domain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A project with a walkthrough, as the smallest one, and no domain for the soak."""
    (tmp_path / "pyproject.toml").write_text("[tool.outbox]\nsoak = 'smallest.soak:Domain'\n")
    (tmp_path / "smallest").mkdir()
    (tmp_path / "smallest" / "__init__.py").touch()
    monkeypatch.setenv(project.VARIABLE, str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("smallest", None)


def failure_of(*words: str) -> str:
    """The code of the failure of `outbox soak`."""
    failure = CliRunner().invoke(soak, words).exception
    assert isinstance(failure, Failure)
    return failure.code


def test_what_is_wrong_with_a_project_is_said_and_nothing_is_begun(without_domain: Path) -> None:
    assert failure_of("--faults", "kafka-killed,nothing-*") == "fault-unknown"
    assert failure_of("--seed", "1") == "soak-domain-missing"
    source = "class Domain:\n    sinks = ('orders',)\n\n    def __init__(self, seed): pass\n"
    (without_domain / "smallest" / "soak.py").write_text(source)
    with raises("soak-domain-wrong"):  # it does not group its sinks
        domain.load(1)
    assert not (without_domain / ".outbox").exists()
