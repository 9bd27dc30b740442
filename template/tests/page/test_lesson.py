"""The lesson around a story: it asks, waits, plays and explains by what was measured."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
from outbox.base.errors import Failure
from outbox.base.wait import wait_for
from outbox.walkthrough import Screen, Step, Story

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
    assert "214" in answers["2"]
    assert "268,113" in answers["2"]
    assert "604" in answers["4"]
    assert "911,870" in answers["5"]


def test_a_paused_lesson_asks_and_waits_for_each_step(lesson: Lesson, hub: Hub) -> None:
    story = Told()
    player = threading.Thread(target=play, args=[lesson, story], kwargs={"paused": True})
    player.start()
    for number in range(3):
        wait_for("the question", partial(_asks, hub, number), timeout_s=10)
        assert story.played == list(range(number))
        lesson.step()
    wait_for("the next question", lambda: _asks(hub, 3), timeout_s=10)
    lesson.resume()
    player.join(10)
    assert story.played == list(range(len(TITLES)))


def _asks(hub: Hub, step: int) -> bool:
    part = shown(hub)
    return part.get("phase") == "asking" and part.get("step") == step and part.get("paused") is True


def test_the_answer_is_not_told_before_the_step_is_played(lesson: Lesson, hub: Hub) -> None:
    player = threading.Thread(target=play, args=[lesson, Told()], kwargs={"paused": True})
    player.start()
    wait_for("the first wait", lambda: _asks(hub, 0), timeout_s=10)
    lesson.step()
    wait_for("the first question", lambda: _asks(hub, 1), timeout_s=10)
    assert shown(hub)["question"]["text"] == QUESTIONS[1].text
    assert shown(hub)["answers"] == {}
    lesson.resume()
    player.join(10)


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


def test_the_token_is_for_the_terminal_alone(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    PageScreen(hub).address("http://127.0.0.1:8090/#secret")
    assert "#secret" in capsys.readouterr().out
    hub.publish({"slot": 1})
    assert b"secret" not in next(hub.subscribe())
