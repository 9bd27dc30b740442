"""The walkthrough without its parts: the story on a chain that is a model, its faults, clients, workload and player."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import requests

from outbox.audit.report import ComparisonReport, Report, SinkReport, TopicReport
from outbox.base import project
from outbox.base.errors import Failure
from outbox.base.settings import Settings, load
from outbox.base.wait import WaitTimeoutError
from outbox_lab.commands import demo
from outbox_lab.testing.failures import raises
from outbox_lab.walkthrough import containers, faults, story, workload
from outbox_lab.walkthrough.chain import Chain
from outbox_lab.walkthrough.faults import Crash
from outbox_lab.walkthrough.story import Player, Screen, Story
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


@pytest.mark.parametrize("history", [0, 50])
def test_a_right_chain_keeps_every_expectation_with_data_before(
    history: int, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = tell(Model(settings, history), monkeypatch)
    assert told.failed is None
    assert len(told.held) > 10
    [(header, rows)] = told.tables
    table = [dict(zip(header[1:], row[1:], strict=True)) for row in rows]
    assert [row["new duplicates on topic"] for row in table] == [0, RESENT, 0, 0]
    assert [row["skipped by A"] for row in table] == [0, RESENT, 0, story.REQUESTS_BURST]
    assert [row["drift of A"] for row in table] == ["0"] * 4
    resent, burst = RESENT * SIZE, (RESENT + story.REQUESTS_BURST) * SIZE
    assert [row["drift of B"] for row in table] == ["0", str(resent), str(resent), str(burst)]
    assert [row["drifting keys"] for row in table] == [0, 1, 1, 1]


def test_without_a_naive_sink_the_story_is_that_of_the_right_one(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = tell(Model(settings), monkeypatch, naive=None)
    assert told.failed is None
    assert not [claim for claim in told.held if "sink B" in claim]
    assert told.tables[0][0] == ["phase", "new duplicates on topic", "skipped by A", "drift of A"]


@pytest.mark.parametrize("history", [0, 50])
def test_a_right_sink_that_applies_repeats_is_found(
    history: int, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model(settings, history)
    model.right_skips = False
    broken = tell(model, monkeypatch).broken
    assert broken == {
        "sink A skips every one that it reads",
        "sink A agrees with the source",
        "sink A skips every event of the batch that it had applied",
    }


def test_repeats_under_exactly_once_are_found(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(settings)
    model.resends_with_exactly_once = 1
    assert tell(model, monkeypatch).broken == {"no new duplicate on the topic"}


def killing(model: Model, monkeypatch: pytest.MonkeyPatch, also: Callable[[], None]) -> None:
    """Let a kill of the worker, or of the sinks, do something else too."""
    kill = model.kill

    def both() -> None:
        kill()
        also()

    monkeypatch.setattr(model, "kill", both)


def test_a_loss_is_found_and_an_earlier_one_is_not_counted_again(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model(settings, history=5)
    model.lost = 2
    assert tell(model, monkeypatch).broken == set()

    def lose() -> None:
        model.lost += 1

    killing(model, monkeypatch, lose)
    assert tell(model, monkeypatch).broken == {"nothing is lost"}


def test_a_fault_that_did_not_fire_is_found(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(settings)
    model.has_fired = False
    assert tell(model, monkeypatch).broken == {f"sink {RIGHT} was killed in the window"}


def test_a_naive_sink_that_drifts_by_another_sum_is_found(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(settings)

    def drift() -> None:
        model.drift[NAIVE]["b"] += 1

    killing(model, monkeypatch, drift)
    assert {claim.partition(" ")[0] for claim in tell(model, monkeypatch).broken} == {"sink"}


def test_a_step_that_fails_leaves_nothing_frozen(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(settings)

    def fail() -> None:
        raise Failure("it does not die", code="part-lives")

    killing(model, monkeypatch, fail)
    with raises("part-lives", "does not die"):
        tell(model, monkeypatch)
    assert not model.is_frozen


def test_a_workload_of_another_project_is_a_failure(settings: Settings) -> None:
    planned: Any = SimpleNamespace(right="elsewhere", naive=None)
    with raises("sink-unknown", "elsewhere"):
        Story(cast(Chain, Model(settings)), planned, Told())


# Faults leave the sinks running, whatever fails ---------------------------------------------------------------------


def fail(*_: object) -> Any:
    raise WaitTimeoutError("they do not do so")


def chain_of(done: list[str]) -> Chain:
    """A chain whose sinks note what is done to them, and do not end."""
    sinks = SimpleNamespace(resume=lambda: done.append("resume"), start=lambda: done.append("start"), kill=fail)
    return cast(Chain, SimpleNamespace(settings=None, sinks=sinks))


def test_sinks_that_missed_the_window_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    done = list[str]()
    window = SimpleNamespace(kill_in_it=fail, close=lambda: done.append("release"))
    monkeypatch.setattr(faults, "Window", lambda *_: window)
    with pytest.raises(WaitTimeoutError):
        faults.crash_sinks(chain_of(done), ["dedup"], lambda: None)
    assert done[:3] == ["release", "resume", "start"]


def test_sinks_that_were_not_rewound_run_again() -> None:
    done = list[str]()
    with pytest.raises(WaitTimeoutError):
        faults.rewind_sink(chain_of(done), "dedup")
    assert done == ["start"]


# Clients: what they send, repeat, count, and report as unexpected --------------------------------------------------


class Service:
    """Answers in place of the service: each path with its list of statuses, the last one for ever."""

    def __init__(self, **answers: list[int | Exception]) -> None:
        self._answers = answers
        self.not_json: set[str] = set()
        self.received: list[tuple[str, dict[str, str], bytes | None]] = []

    def request(self, method: str, url: str, *, data: bytes | None, headers: dict[str, str], timeout: float) -> Any:
        """As `requests.Session.request`."""
        assert timeout > 0
        path = url.rpartition("/")[2]
        self.received.append((f"{method} {path}", headers, data))
        answers = self._answers[path]
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        response = requests.Response()
        response.status_code = answer
        response._content = b"<html>" if path in self.not_json else json.dumps({"ok": True}).encode()
        return response


class Fixed:
    """A workload that sets up with the first request, and then plans all of them in turn."""

    right = "dedup"
    naive: str | None = None

    def __init__(self, *planned: Request) -> None:
        self._planned = planned
        self._count = 0
        self.read: list[Any] = []

    def set_up(self, send: Callable[[Sequence[Request]], list[Any]]) -> None:
        self.read = send(self._planned[:1])

    def plan(self) -> Request:
        self._count += 1
        return self._planned[(self._count - 1) % len(self._planned)]


def traffic(service: Service, workload: Fixed, monkeypatch: pytest.MonkeyPatch) -> Traffic:
    monkeypatch.setattr(Traffic, "session", lambda _: service)
    return Traffic(load(Path("/nonexistent"), environment=False, service_token="secret"), workload)


def test_request_is_repeated_with_its_key_until_it_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(orders=[503, requests.ConnectionError(), requests.Timeout(), 201])
    clients = traffic(service, Fixed(Request("order", "/orders", {}, (201,), events=3)), monkeypatch)
    clients.run(1)
    assert len(service.received) == 4
    assert len({headers["Idempotency-Key"] for _, headers, _ in service.received}) == 1
    assert (clients.answered, clients.events, clients.surprises) == (Counter(order=1), 3, [])


def test_each_request_has_its_key_and_only_successful_ones_have_written_events(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = (
        Request("order", "/orders", {}, (201, 409), events=2),
        Request("order", "/full", {}, (201, 409), events=2),
        Request("invalid", "/strict", {}, (422,)),
    )
    service = Service(orders=[201], full=[409], strict=[422, 201])
    clients = traffic(service, Fixed(*planned), monkeypatch)
    clients.run(6)
    assert clients.answered == {"order": 2, "order refused": 2, "invalid": 2}
    assert (clients.events, clients.surprises) == (4, ['invalid got 201: {"ok": true}'])
    assert len({headers["Idempotency-Key"] for _, headers, _ in service.received}) == 6


def test_a_request_is_sent_as_it_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = (
        Request("order", "/orders", {"pieces": 1}, (201,), method="PUT"),
        Request("not JSON", "/raw", b"{", (400,), has_key=False),
        Request("no token", "/closed", [], (401,), has_token=False),
        Request("page", "/page", None, (200,), method="GET", has_key=False),
    )
    service = Service(orders=[201], raw=[400], closed=[401], page=[200])
    traffic(service, Fixed(*planned), monkeypatch).run(4)
    sent = {name: (set(headers), data) for name, headers, data in service.received}
    assert sent == {
        "PUT orders": ({"Content-Type", "Authorization", "Idempotency-Key"}, b'{"pieces": 1}'),
        "POST raw": ({"Content-Type", "Authorization"}, b"{"),
        "POST closed": ({"Content-Type", "Idempotency-Key"}, b"[]"),
        "GET page": ({"Content-Type", "Authorization"}, None),
    }
    assert {headers.get("Authorization") for _, headers, _ in service.received} == {"Bearer secret", None}


def test_set_up_fails_at_an_unexpected_response(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = Fixed(Request("shelf", "/shelves", {}, (201,), events=1))
    clients = traffic(Service(shelves=[201, 500]), workload, monkeypatch)
    clients.set_up()
    assert (workload.read, clients.events) == ([{"ok": True}], 1)
    with raises("failed", "shelf got 500"):
        clients.set_up()


class Listening(Fixed):
    """A workload that keeps the answers to what it planned."""

    def answered(self, request: Request, status: int, body: Any) -> None:
        self.read.append((request.kind, status, body))


def test_a_workload_sees_the_answers_if_it_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    page = Request("page", "/page", {}, (200,), method="GET", has_key=False)
    workload = Listening(Request("order", "/orders", {}, (201,)), page)
    service = Service(orders=[201], page=[200])
    service.not_json = {"page"}
    traffic(service, workload, monkeypatch).run(2)
    assert sorted(workload.read, key=str) == [("order", 201, {"ok": True}), ("page", 200, None)]


def test_a_workload_that_stops_writing_events_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = Request("order", "/orders", {}, (201, 409), events=1)
    clients = traffic(Service(orders=[201, 201, 409]), Fixed(planned), monkeypatch)
    clients.require_events(3)  # nothing has been sent yet
    clients.start(20)()
    clients.require_events(2)
    with raises("workload-idle", "plan()", "2", "3", "demo/workload.py"):
        clients.require_events(3)


def test_what_plan_raises_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    clients = traffic(Service(orders=[201]), Fixed(), monkeypatch)
    with pytest.raises(ZeroDivisionError):
        clients.start(1)()
    with pytest.raises(ZeroDivisionError):
        clients.require_events(1)


# Workload and player -----------------------------------------------------------------------------------------------

WORKLOAD = """
class {name}:
    right = "stock"
    naive = {naive!r}

    def __init__(self, seed):
        self.seed = seed
"""
Write = Callable[..., None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes a workload, by the name that ``[tool.outbox]`` has then."""

    def write(module: str = "clients", name: str = "Workload", naive: str | None = None) -> None:
        (tmp_path / f"{module}.py").write_text(WORKLOAD.format(name=name, naive=naive))
        monkeypatch.syspath_prepend(str(tmp_path))
        named(monkeypatch, workload=f"{module}:{name}")

    return write


def test_the_project_says_where_it_is(write: Write) -> None:
    write("clients_elsewhere", "Buyers")
    loaded = workload.load(seed=7)
    assert (type(loaded).__name__, loaded.seed) == ("Buyers", 7)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["nowhere:Workload", "outbox:Nothing", "outbox", ""])
def test_without_a_workload_it_is_a_failure(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    named(monkeypatch, workload=name)
    with raises("workload-missing", "[tool.outbox]"):
        workload.load(seed=1)


@pytest.mark.parametrize("name", ["naive", None, "unknown"])
def test_a_container_becomes_the_naive_sink_or_waits(
    name: str | None, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[object] = []
    monkeypatch.setattr(os, "execvp", lambda _, words: done.append(words))
    monkeypatch.setattr(signal, "pause", lambda: done.append("waits"))
    write(f"clients_with_{name}", naive=name)
    containers.main()
    # The real execvp does not return.
    assert done[0] == (["python", "-m", "outbox", "sink", "naive"] if name == "naive" else "waits")


def named(monkeypatch: pytest.MonkeyPatch, **names: str) -> None:
    """Let the project name a player, or a workload."""
    ours = replace(project.current(), **names)  # type: ignore[arg-type]
    monkeypatch.setattr(project, "current", lambda: ours)


def test_a_project_may_name_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "theatre.py").write_text("from outbox_lab.walkthrough import Player\nclass Actor(Player): pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert type(story.load_player()) is Player
    named(monkeypatch, player="theatre:Actor")
    assert type(story.load_player()).__name__ == "Actor"


@pytest.mark.parametrize("name", ["nowhere:Player", "nowhere.stage.actors:Player"])
def test_without_the_folder_of_the_player_the_terminal_plays(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    named(monkeypatch, player=name)
    assert type(story.load_player()) is Player
    assert "nowhere" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["outbox:Nothing", "outbox", "broken:Player"])
def test_one_that_cannot_be_made_is_a_failure(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken.py").write_text("import a_package_that_is_not_installed\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    named(monkeypatch, player=name)
    with raises("player-missing", "[tool.outbox]"):
        story.load_player()


class Careless(Player):
    """A player that cannot end what it started."""

    def play(self, story: object) -> None:
        pass

    def close(self) -> None:
        raise RuntimeError("a thread hangs")


@pytest.fixture
def handlers() -> Iterator[None]:
    """The signal handlers of this process, which the command sets."""
    before = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)}
    yield
    for one, handler in before.items():
        signal.signal(one, handler)


@pytest.mark.usefixtures("handlers")
def test_the_chain_is_torn_down_when_the_player_cannot_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    told = SimpleNamespace(tear_down=lambda: ended.append("the chain"))
    monkeypatch.setattr(story, "load_player", Careless)
    monkeypatch.setattr(workload, "load", lambda _: SimpleNamespace())
    monkeypatch.setattr(demo, "chain_of_processes", lambda *_: SimpleNamespace())
    monkeypatch.setattr(story, "Story", lambda *_: told)
    with pytest.raises(RuntimeError, match="hangs"):
        demo.demo.main(["--once"], standalone_mode=False)
    assert ended == ["the chain"]
