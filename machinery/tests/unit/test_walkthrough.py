"""The walkthrough without its parts: the story on a chain that is a model, its clients, and its containers, which are
real processes.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from decimal import Decimal
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
import requests

from outbox.audit.report import ComparisonReport, Report, SinkReport, TopicReport
from outbox.base import project
from outbox.base.errors import Failure
from outbox.base.settings import Settings, load
from outbox.base.wait import wait_for
from outbox.relay import lifecycle
from outbox_lab.stack import ports
from outbox_lab.stack.stack import quiet
from outbox_lab.testing.failures import raises
from outbox_lab.walkthrough import containers, faults, story, workload
from outbox_lab.walkthrough.chain import Chain
from outbox_lab.walkthrough.containers import Containers
from outbox_lab.walkthrough.faults import Crash
from outbox_lab.walkthrough.story import Screen, Story
from outbox_lab.walkthrough.traffic import Traffic
from outbox_lab.walkthrough.workload import Request

RIGHT, NAIVE = "dedup", "naive"
SIZE = Decimal(10)  # what an event adds to the total of its key
RESENT = 3  # events that a killed worker sends again without exactly-once


# The story -----------------------------------------------------------------------------------------------------------


def nothing(*_: object, **__: object) -> None:
    """Do nothing."""


class Model:
    """A chain, and every part of it: all right unless a test says otherwise. Keys are ``a`` and ``b``."""

    name = "model"
    require_running = pid = restore = wait_replayed = close = nothing

    def __init__(self, settings: Settings, history: int = 0) -> None:
        """``history``: events that were there before, each sent twice, so that the naive sink has drifted."""
        self.settings = settings
        self.events = self.duplicates = self.skipped = self.lost = 0
        self.unread = 0  # duplicates of events that no sink reads
        self.totals = {"a": Decimal(0), "b": Decimal(0)}
        self.repeated = {"a": Decimal(0), "b": Decimal(0)}
        self.drift = {RIGHT: {"a": Decimal(0)}, NAIVE: {"a": Decimal(0), "b": Decimal(0)}}
        self.exactly_once = self.requested = False
        self.resends_with_exactly_once, self.right_skips = 0, True
        self.is_killed = self.is_frozen = False
        self.has_fired = True
        self.loses_at_kill, self.drifts_at_kill, self.does_not_die = 0, 0, False
        self.worker = self.sinks = self.service = self
        self.write(history)
        self.repeat(history)

    def start(self, _: object = None) -> None:
        self.is_killed = False

    def request(self, *, exactly_once: bool) -> None:
        self.requested = exactly_once

    def start_worker(self, _: object) -> None:
        self.exactly_once = self.requested
        self.is_killed = False

    def switch(self, *, exactly_once: bool, report: object) -> None:
        self.request(exactly_once=exactly_once)
        self.start_worker(report)

    def pause(self) -> None:
        self.is_frozen = True

    def resume(self) -> None:
        self.is_frozen = False

    def kill(self) -> None:
        self.is_killed = True
        self.repeat(self.resends_with_exactly_once if self.exactly_once else RESENT)
        self.lost += self.loses_at_kill
        self.drift[NAIVE]["b"] += self.drifts_at_kill
        if self.does_not_die:
            raise Failure("it does not die", code="part-lives")

    def is_running(self) -> bool:
        return not self.is_killed

    def kill_in_it(self, burst: Callable[[], None]) -> dict[str, Crash]:
        """Kill the sinks in the window."""
        before = self.events
        burst()
        self.apply_again(self.events - before)
        position = 7 if self.has_fired else 6
        return {RIGHT: Crash(planned_batch=2, committed_batch=1, planned_end=7, position=position)}

    def write(self, events: int) -> None:
        self.events += events
        self.totals["a"] += events * SIZE

    def repeat(self, events: int) -> None:
        """The topic has so many events again."""
        self.duplicates += events
        self.unread += bool(events)
        self.repeated["a"] += events * SIZE
        self.apply_again(events)

    def apply_again(self, events: int) -> None:
        """The sinks get so many events again."""
        self.skipped += events if self.right_skips else 0
        self.drift[RIGHT]["a"] += 0 if self.right_skips else events * SIZE
        self.drift[NAIVE]["a"] += events * SIZE

    def report(self, *_: object, **__: object) -> Report:
        topic = TopicReport("stock.item", self.events, self.events + self.duplicates)
        topic.repeated["item.picked"] = self.duplicates
        topic.lost = [str(number) for number in range(self.lost)]
        other = TopicReport("stock.order", records=self.unread)
        other.repeated["order.placed"] = self.unread
        sinks = []
        for name, skipped in ((RIGHT, self.skipped), (NAIVE, 0)):
            drift, repeated = ({key: one for key, one in of.items() if one} for of in (self.drift[name], self.repeated))
            sinks.append(
                SinkReport(name, [ComparisonReport("totals", {**self.totals}, drift, repeated)], duplicates=skipped)
            )
        return Report([topic, other], sinks)


class Clients:
    """Clients whose every request writes an event."""

    require_events = nothing

    def __init__(self, model: Model) -> None:
        self._model = model
        self.events = 0
        self.answered: dict[str, int] = {}
        self.surprises: list[str] = []
        self.is_stopped = False

    def set_up(self) -> None:
        self.run(1)

    def run(self, count: int) -> None:
        self._model.write(count)
        self.events += count

    def start(self, count: int) -> Callable[[], None]:
        self.run(count)
        return lambda: None

    def stop(self) -> None:
        self.is_stopped = True


class Told(Screen):
    """The expectations, by claim whether they held."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[str, bool] = {}
        self.tables: list[tuple[Sequence[str], Sequence[Sequence[object]]]] = []

    def expect(self, held: bool, claim: str, found: str) -> None:
        super().expect(held, claim, found)
        self.held[claim] = held and self.held.get(claim, True)

    def table(self, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        self.tables.append((header, rows))

    @property
    def broken(self) -> set[str]:
        return {claim for claim, held in self.held.items() if not held}


@pytest.fixture
def settings(tmp_path: Any) -> Settings:
    return load(tmp_path, environment=False)


def tell(model: Model, monkeypatch: pytest.MonkeyPatch, naive: str | None = NAIVE) -> Told:
    """Play the whole story on a model. Its workload is never asked: the traffic is a model too."""

    def mode(_: object) -> Any:
        return SimpleNamespace(mode="exactly-once" if model.exactly_once else "at-least-once")

    traffic = Clients(model)
    published = iter(range(0, 10**9, story.PUBLISHED_EVENTS))
    monkeypatch.setattr(story, "check", SimpleNamespace(check=model.report, check_settled=model.report))
    monkeypatch.setattr(story, "lifecycle", SimpleNamespace(status=mode))
    monkeypatch.setattr(story, "Rest", lambda _: SimpleNamespace(restart_task=lambda: None))
    monkeypatch.setattr(story, "Traffic", lambda *_, **__: traffic)
    monkeypatch.setattr(faults, "Window", lambda *_: model)
    monkeypatch.setattr(Story, "published_events", lambda _: next(published))
    monkeypatch.setattr(Story, "unrelayed_events", lambda _: story.BACKLOG_EVENTS)
    told = Told()
    planned: Any = SimpleNamespace(right=RIGHT, naive=naive)
    one = Story(cast(Chain, model), planned, told)
    try:
        one.play()
    finally:
        one.stop()
        assert traffic.is_stopped
    return told


@pytest.mark.parametrize("naive", [NAIVE, None])
@pytest.mark.parametrize("history", [0, 50])
def test_a_right_chain_keeps_every_expectation_with_data_before(
    history: int, naive: str | None, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = tell(Model(settings, history), monkeypatch, naive)
    assert told.failed is None
    assert len(told.held) > 8
    assert any("sink B" in claim for claim in told.held) == (naive is not None)
    [(header, rows)] = told.tables
    table = [dict(zip(header[1:], row[1:], strict=True)) for row in rows]
    assert [row["new duplicates on topic"] for row in table] == [0, RESENT, 0, 0]
    assert [row["skipped by A"] for row in table] == [0, RESENT, 0, story.REQUESTS_BURST]
    assert [row["drift of A"] for row in table] == ["0"] * 4
    if naive:
        resent, burst = RESENT * SIZE, (RESENT + story.REQUESTS_BURST) * SIZE
        assert [row["drift of B"] for row in table] == ["0", str(resent), str(resent), str(burst)]
        assert [row["drifting keys"] for row in table] == [0, 1, 1, 1]


@pytest.mark.parametrize("history", [0, 50])
@pytest.mark.parametrize(
    ("wrong", "claims"),
    [
        (
            {"right_skips": False},
            {
                "sink A skips every one that it reads",
                "sink A agrees with the source",
                "sink A skips every event of the batch that it had applied",
            },
        ),
        ({"resends_with_exactly_once": 1}, {"no new duplicate on the topic"}),
        ({"has_fired": False}, {f"sink {RIGHT} was killed in the window"}),
        ({"loses_at_kill": 1}, {"nothing is lost"}),
        ({"drifts_at_kill": 1}, {story.RESENT, "sink B drifts further, key by key, by exactly that batch"}),
    ],
    ids=["repeats applied", "repeats under exactly-once", "fault not fired", "loss", "another drift"],
)
def test_what_is_wrong_is_found_and_what_was_wrong_before_is_not_counted_again(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, wrong: dict[str, Any], claims: set[str], history: int
) -> None:
    model = Model(settings, history)
    model.lost = history // 25
    vars(model).update(wrong)
    assert tell(model, monkeypatch).broken == claims


def test_a_step_that_fails_leaves_nothing_frozen(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(settings)
    model.does_not_die = True
    with raises("part-lives", "does not die"):
        tell(model, monkeypatch)
    assert not model.is_frozen


# Clients and naive sink ----------------------------------------------------------------------------------------------


class Service:
    """Answers in place of the service: each path with its list of statuses, the last one for ever."""

    def __init__(self, **answers: list[int | Exception]) -> None:
        self._answers = answers
        self.keys: dict[str, list[str]] = {path: [] for path in answers}

    def request(self, method: str, url: str, *, data: bytes, headers: dict[str, str], timeout: float) -> Any:
        """As `requests.Session.request`."""
        assert (method, data, timeout > 0) == ("POST", b"{}", True)
        path = url.rpartition("/")[2]
        self.keys[path].append(headers["Idempotency-Key"])
        answers = self._answers[path]
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        response = requests.Response()
        response.status_code = answer
        response._content = b'{"ok": true}'
        return response


def test_a_request_is_repeated_with_its_key_until_it_is_answered_and_idle_clients_are_named(
    monkeypatch: pytest.MonkeyPatch, settings: Settings
) -> None:
    planned = Request("order", "/orders", {}, (201, 409), events=3), Request("invalid", "/strict", {}, (422,))
    service = Service(orders=[503, requests.ConnectionError(), requests.Timeout(), 201, 409], strict=[422, 201])
    monkeypatch.setattr(Traffic, "session", lambda _: service)
    workload: Any = SimpleNamespace(right=RIGHT, naive=None, plan=cycle(planned).__next__)
    clients = Traffic(settings, workload)
    clients.start(4)()
    assert [(len(keys), len({*keys})) for keys in service.keys.values()] == [(5, 2), (2, 2)]
    assert clients.answered == {"order": 1, "order refused": 1, "invalid": 2}
    assert (clients.events, clients.surprises) == (3, ['invalid got 201: {"ok": true}'])
    clients.require_events(3)
    with raises("workload-idle", "plan()", "3", "4", "demo/workload.py"):
        clients.require_events(4)


@pytest.mark.parametrize("name", ["naive", None, "unknown"])
def test_a_container_becomes_the_naive_sink_of_the_workload_or_waits(
    name: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[object] = []
    monkeypatch.setattr(os, "execvp", lambda _, words: done.append(words))
    monkeypatch.setattr(signal, "pause", lambda: done.append("waits"))
    module = f"clients_with_{name}"
    (tmp_path / f"{module}.py").write_text(
        f"class Buyers:\n    naive = {name!r}\n\n    def __init__(self, seed):\n        self.seed = seed\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    ours = replace(project.current(), workload=f"{module}:Buyers")
    monkeypatch.setattr(project, "current", lambda: ours)
    assert workload.load(seed=7).seed == 7  # type: ignore[attr-defined]
    containers.main()
    # The real execvp does not return.
    assert done[0] == (["python", "-m", "outbox", "sink", "naive"] if name == "naive" else "waits")


def test_a_player_that_the_project_does_not_have_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = replace(project.current(), player="outbox:Nothing")
    monkeypatch.setattr(project, "current", lambda: ours)
    with raises("player-missing", "[tool.outbox]"):
        story.load_player()


# Containers, without Docker: real processes that start again when they have ended -------------------------------------


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
            # As Docker does with `restart: unless-stopped`.
            argv = ["sh", "-c", 'while :; do "$@"; done', "sh", sys.executable, *command]
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


def test_a_kill_leaves_no_process_and_docker_starts_it_again(chain: Containers, tmp_path: Path) -> None:
    commands = [[one.cmdline()[1:] for one in part.mains()] for part in (chain.worker, chain.sinks)]
    assert (commands[0], sorted(commands[1])) == ([[*WORKER]], [[*SINK], [*SINK, "naive"]]), "and no others"
    family = chain.sinks.processes()
    assert len(family) == 4
    chain.sinks.kill()
    assert not chain.sinks.is_running()
    assert not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in family)
    assert not (tmp_path / "ended-gently").exists()
    chain.sinks.start()
    assert chain.sinks.is_running()
    chain.sinks.require_running()


def test_a_stop_is_gentle_even_for_a_frozen_part_and_what_ends_unasked_has_failed(
    chain: Containers, tmp_path: Path
) -> None:
    before = chain.worker.pid()
    chain.worker.pause()
    chain.worker.stop()
    assert (tmp_path / "ended-gently").exists()
    chain.worker.start()
    [worker] = chain.worker.mains()
    assert worker.pid != before
    worker.kill()
    wait_for("another one", lambda: chain.worker.pid() not in (None, worker.pid), timeout_s=30)
    with raises("process-ended", "docker compose logs connect"):  # even if Docker has started it again
        chain.worker.require_running()


def test_elsewhere_it_touches_nothing_and_one_walkthrough_runs_at_a_time(settings: Settings, shared: Path) -> None:
    with raises("not-in-a-container", "docker compose run"):
        Containers(settings, ["dedup"], shared / "nowhere", find=lambda: pytest.fail("it looks for processes"))
    other = os.open(shared, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    with raises("walkthrough-running"):
        Containers(settings, ["dedup"], shared)
    os.close(other)  # as when its process ends
    Containers(settings, ["dedup"], shared)


def test_the_worker_reads_its_mode_when_it_starts_and_is_left_as_it_was_configured(
    chain: Containers, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, file = list[tuple[str, str]](), shared / containers.MODE_FILE

    def note(what: str) -> None:
        walkthrough, mode = file.read_text().split() if file.exists() else (str(os.getpid()), "configured")
        assert walkthrough == str(os.getpid())
        calls.append((what, mode))

    monkeypatch.setattr(lifecycle, "disable_exactly_once", lambda _: note("disable"))
    monkeypatch.setattr(lifecycle, "apply", lambda settings: note(f"apply {settings.exactly_once}"))
    monkeypatch.setattr(containers.Container, "stop", lambda part: note(f"stop {part.name}"))
    chain.switch(exactly_once=False, report=quiet)
    assert calls == [("disable", "false"), ("stop connect", "false"), ("apply False", "false")]
    assert chain.settings.exactly_once is False
    calls.clear()
    for _ in range(2):  # the second one does nothing
        chain.restore(quiet)
        assert calls == [("stop connect", "configured"), ("apply True", "configured")]
    assert [*shared.iterdir()] == []
