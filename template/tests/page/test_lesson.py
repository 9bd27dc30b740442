"""The lesson around a story: it asks, waits, plays and explains by what was measured."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
from outbox.base.errors import Failure
from outbox.base.wait import wait_for
from outbox_lab.walkthrough import Screen, Step, Story

from demo.page.hub import Hub
from demo.page.lesson import QUESTIONS, Lesson, PageScreen
from template.tests.page.made_up import PHASES, TITLES


class Told:
    """A story whose steps note that they were played."""

    chain: Any
    workload: Any

    def __init__(self, fails_at: int | None = None) -> None:
        self.played: list[int] = []
        self.phases: list[object] = []
        self.is_stopped = False
        self._fails_at = fails_at

    def stop(self) -> None:
        self.is_stopped = True

    @property
    def steps(self) -> list[Step]:
        return [Step(title, self._play(number)) for number, title in enumerate(TITLES)]

    def _play(self, number: int) -> Callable[[], None]:
        def play() -> None:
            if number == self._fails_at:
                raise Failure("the worker has ended\nand its log")
            self.played.append(number)
            if 1 <= number <= 4:
                self.phases.append(PHASES[number - 1])

        return play


@pytest.fixture
def hub() -> Hub:
    return Hub({"lines": 100, "marks": 10}, {})


@pytest.fixture
def marks() -> list[str]:
    return []


@pytest.fixture
def lesson(hub: Hub, marks: list[str]) -> Lesson:
    return Lesson(hub, lambda _, text: marks.append(text), lambda _: None)


def play(lesson: Lesson, story: Told, *, paused: bool = False) -> None:
    lesson.play(cast(Story, story), cast(Screen, SimpleNamespace(title=lambda _: None, failed=None)), paused=paused)


def shown(hub: Hub) -> dict[str, Any]:
    return dict(hub.part("lesson") or {})


def test_every_step_is_played_and_marked(lesson: Lesson, hub: Hub, marks: list[str]) -> None:
    story = Told()
    play(lesson, story)
    assert story.played == list(range(len(TITLES)))
    assert marks == list(TITLES)
    assert shown(hub)["phase"] == "over"
    assert shown(hub)["done"] == len(TITLES)


def test_each_answer_has_what_was_measured(lesson: Lesson, hub: Hub) -> None:
    play(lesson, Told())
    answers = shown(hub)["answers"]
    assert answers.keys() == {str(number) for number in QUESTIONS}
    assert {number: answer["right"] for number, answer in answers.items()} == {"1": 1, "2": 2, "3": 0, "4": 1, "5": 0}
    assert "214" in answers["2"]["text"]
    assert "268,113" in answers["2"]["text"]
    assert "604" in answers["4"]["text"]
    assert "911,870" in answers["5"]["text"]


@pytest.mark.parametrize(
    ("number", "change", "right"),
    [
        (1, {"drift_naive": Decimal(5)}, 0),
        (1, {"topic_duplicates": 3}, 2),
        (1, {"drift_right": Decimal(5)}, None),
        (1, {"drift_naive": None}, None),
        (2, {"topic_duplicates": 0}, 1),
        (3, {"topic_duplicates": 300}, 1),
        (3, {"topic_duplicates": 3}, 2),
        (4, {"drift_naive": PHASES[2].drift_naive}, 0),
        (4, {"drift_right": Decimal(7)}, 2),
        (5, {"drift_right": Decimal(7)}, None),
    ],
)
def test_the_right_option_is_the_one_that_was_measured(number: int, change: dict[str, Any], right: int | None) -> None:
    phases = list(PHASES[: min(number, 4)])
    phases[-1] = replace(phases[-1], **change)
    assert QUESTIONS[number].explain(phases)["right"] == right


def test_a_step_is_played_once_however_often_it_is_asked_for(lesson: Lesson, hub: Hub) -> None:
    story = Told()
    player = threading.Thread(target=play, args=[lesson, story], kwargs={"paused": True})
    player.start()
    wait_for("the first wait", lambda: _asks(hub, 0), timeout_s=10)
    assert [lesson.step(), lesson.step()] == [True, False]
    wait_for("the first question", lambda: _asks(hub, 1), timeout_s=10)
    with pytest.raises(TimeoutError):
        wait_for("a step that nobody asked for", lambda: len(story.played) > 1, timeout_s=0.5)
    assert lesson.resume()
    player.join(10)
    assert story.played == list(range(len(TITLES)))


def test_a_paused_lesson_asks_and_waits_for_each_step(lesson: Lesson, hub: Hub) -> None:
    story = Told()
    player = threading.Thread(target=play, args=[lesson, story], kwargs={"paused": True})
    player.start()
    for number in range(3):
        wait_for("the question", partial(_asks, hub, number), timeout_s=10)
        assert story.played == list(range(number))
        assert shown(hub)["answers"].keys() == {str(one) for one in range(1, number)}, "no answer before its step"
        lesson.step()
    wait_for("the next question", lambda: _asks(hub, 3), timeout_s=10)
    assert shown(hub)["question"] == {"text": QUESTIONS[3].text, "options": list(QUESTIONS[3].options)}
    lesson.resume()
    player.join(10)
    assert story.played == list(range(len(TITLES)))


def _asks(hub: Hub, step: int) -> bool:
    part = shown(hub)
    return part.get("phase") == "asking" and part.get("step") == step and part.get("paused") is True


def test_a_failure_is_shown_and_raised(lesson: Lesson, hub: Hub) -> None:
    with pytest.raises(Failure):
        play(lesson, Told(fails_at=2))
    assert shown(hub)["phase"] == "failed"
    assert shown(hub)["failed"] == "the worker has ended"


def test_the_terminal_and_the_page_say_the_same(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    screen = PageScreen(hub)
    screen.title("A step")
    screen.say("a fact")
    screen.progress("going on")
    screen.expect(True, "a claim", "as found")
    screen.expect(False, "another", "not found")
    printed = capsys.readouterr().out
    _, frame = next(hub.subscribe()).decode().split("data: ")
    for text in ("A step", "a fact", "going on", "a claim", "as found", "another", "not found"):
        assert text in printed
        assert text in frame
    assert screen.failed == "another: not found"
