"""Expectations of the walkthrough, on a chain that is a model: also on one with data, and of chains that fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import pytest

from outbox.audit.report import ComparisonReport, Report, SinkReport, TopicReport
from outbox.base.errors import Failure
from outbox.base.settings import Settings, load
from outbox_lab.testing.failures import raises
from outbox_lab.walkthrough import faults, story
from outbox_lab.walkthrough.chain import Chain
from outbox_lab.walkthrough.faults import Crash
from outbox_lab.walkthrough.story import Screen, Story
from outbox_lab.walkthrough.workload import Request

RIGHT, NAIVE = "dedup", "naive"
SIZE = Decimal(10)  # what an event adds to the total of its key
RESENT = 3  # events that a killed worker sends again without exactly-once


class Workload:
    """Never asked: the traffic is a model too."""

    right = RIGHT
    naive: str | None = NAIVE

    def set_up(self, send: Callable[[Sequence[Request]], list[Any]]) -> None:  # noqa: ARG002
        raise AssertionError

    def plan(self) -> Request:
        raise AssertionError


class Model(Chain):
    """A chain whose every part is right, unless a test says otherwise. Keys are ``a`` and ``b``."""

    def __init__(self, settings: Settings, history: int = 0) -> None:
        """``history``: events that were there before, each sent twice, so that the naive sink has drifted."""
        self._settings = settings
        self.events = self.duplicates = self.skipped = self.lost = 0
        self.unread = 0  # duplicates of events that no sink reads
        self.totals = {"a": Decimal(0), "b": Decimal(0)}
        self.repeated = {"a": Decimal(0), "b": Decimal(0)}
        self.drift = {RIGHT: {"a": Decimal(0)}, NAIVE: {"a": Decimal(0), "b": Decimal(0)}}
        self.exactly_once = self.requested = False
        self.resends_with_exactly_once, self.right_skips = 0, True
        self.restored = 0
        self.is_killed = self.is_frozen = False
        self.worker = self.sinks = self.service = self  # type: ignore[assignment]
        self.name = "model"
        self.write(history)
        self.repeat(history)

    # The chain

    @property
    def settings(self) -> Settings:
        return self._settings

    def sink_urls(self) -> list[str]:
        raise AssertionError

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

    def restore(self, _: object) -> None:
        self.restored += 1

    # Its parts

    def pause(self) -> None:
        self.is_frozen = True

    def resume(self) -> None:
        self.is_frozen = False

    def kill(self) -> None:
        self.is_killed = True
        self.repeat(self.resends_with_exactly_once if self.exactly_once else RESENT)

    def pid(self) -> int:
        return 1

    def is_running(self) -> bool:
        return not self.is_killed

    def require_running(self) -> None:
        pass

    # What happens

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
        sinks = [
            SinkReport(
                name,
                [
                    ComparisonReport(
                        "totals",
                        dict(self.totals),
                        {key: value for key, value in self.drift[name].items() if value},
                        {key: value for key, value in self.repeated.items() if value},
                    )
                ],
                duplicates=self.skipped if name == RIGHT else 0,
            )
            for name in (RIGHT, NAIVE)
        ]
        return Report([topic, other], sinks)


class Traffic:
    """Clients whose every request writes an event."""

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

    def require_events(self, needed: int) -> None:
        pass

    def stop(self) -> None:
        self.is_stopped = True


class Window:
    """Kills the sinks where it should."""

    has_fired = True

    def __init__(self, model: Model) -> None:
        self._model = model

    def kill_in_it(self, burst: Callable[[], None]) -> dict[str, Crash]:
        before = self._model.events
        burst()
        self._model.apply_again(self._model.events - before)
        position = 7 if self.has_fired else 6
        return {name: Crash(planned_batch=2, committed_batch=1, planned_end=7, position=position) for name in (RIGHT,)}

    def wait_replayed(self, _: object) -> None:
        pass

    def close(self) -> None:
        pass


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


def tell(model: Model, monkeypatch: pytest.MonkeyPatch, workload: Workload | None = None) -> Told:
    """Play the whole story on a model."""

    def mode(_: object) -> Any:
        return SimpleNamespace(mode="exactly-once" if model.exactly_once else "at-least-once")

    traffic = Traffic(model)
    published = iter(range(0, 10**9, story.PUBLISHED_EVENTS))
    monkeypatch.setattr(story, "check", SimpleNamespace(check=model.report, check_settled=model.report))
    monkeypatch.setattr(story, "lifecycle", SimpleNamespace(status=mode))
    monkeypatch.setattr(story, "Rest", lambda _: SimpleNamespace(restart_task=lambda: None))
    monkeypatch.setattr(story, "Traffic", lambda *_, **__: traffic)
    monkeypatch.setattr(faults, "Window", lambda *_: Window(model))
    monkeypatch.setattr(Story, "published_events", lambda _: next(published))
    monkeypatch.setattr(Story, "unrelayed_events", lambda _: story.BACKLOG_EVENTS)
    told = Told()
    one = Story(model, workload or Workload(), told)
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
    alone = Workload()
    alone.naive = None
    told = tell(Model(settings), monkeypatch, alone)
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


def test_a_loss_is_found_and_an_earlier_one_is_not_counted_again(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model(settings, history=5)
    model.lost = 2
    assert tell(model, monkeypatch).broken == set()
    kill = model.kill

    def kill_and_lose() -> None:
        kill()
        model.lost += 1

    monkeypatch.setattr(model, "kill", kill_and_lose)
    assert tell(model, monkeypatch).broken == {"nothing is lost"}


def test_a_fault_that_did_not_fire_is_found(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Window, "has_fired", False)
    assert tell(Model(settings), monkeypatch).broken == {f"sink {RIGHT} was killed in the window"}


def test_a_naive_sink_that_drifts_by_another_sum_is_found(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(settings)
    kill = model.kill

    def kill_and_drift() -> None:
        kill()
        model.drift[NAIVE]["b"] += 1

    monkeypatch.setattr(model, "kill", kill_and_drift)
    assert {claim.partition(" ")[0] for claim in tell(model, monkeypatch).broken} == {"sink"}


def test_a_step_that_fails_leaves_nothing_frozen(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(settings)

    def never() -> None:
        raise Failure("it does not die", code="part-lives")

    monkeypatch.setattr(model, "kill", never)
    with raises("part-lives", "does not die"):
        tell(model, monkeypatch)
    assert not model.is_frozen


def test_a_workload_of_another_project_is_a_failure(settings: Settings) -> None:
    workload = Workload()
    workload.right = "elsewhere"
    with raises("sink-unknown", "elsewhere"):
        Story(Model(settings), workload, Told())
