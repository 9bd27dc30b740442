"""The lesson: the steps of the walkthrough, each with a question before it and a measured answer after it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from decimal import Decimal
from typing import Any

from outbox.walkthrough import Phase, Screen, Story

from demo.page.hub import Hub

WAIT_S = 0.2  # how often a wait looks whether Ctrl-C came


@dataclass(frozen=True)
class Question:
    """A question of the quiz. The answer names fields of the phase that was measured: ``{drift_naive}``."""

    text: str
    options: Sequence[str]
    right: int  # the index of the right option
    answer: str

    def explain(self, phase: Phase) -> str:
        """The answer, with what was measured."""
        return self.answer.format_map({name: _text(value) for name, value in asdict(phase).items()})


# By the place of a step in the story: 0 starts the chain, the last is the verdict.
QUESTIONS: dict[int, Question] = {
    1: Question(
        "Hundreds of transfers, and no fault. Two sinks read the same topic: A remembers event ids, B adds up whatever"
        " comes. Which one agrees with the ledger?",
        ["Only A", "Both", "Neither: Kafka always delivers some events twice"],
        1,
        "Both. Without a fault nothing is repeated: {topic_duplicates} duplicates on the topic, A drifts by"
        " {drift_right}, B by {drift_naive}. A test without faults finds no difference between them.",
    ),
    2: Question(
        "Exactly-once is off. The Connect worker is killed while it relays, and starts again. What does Debezium do?",
        [
            "It loses the events that were under way",
            "It reads on exactly where it stopped",
            "It sends some events again, because their offsets were not stored",
        ],
        2,
        "It sent {topic_duplicates} events again: records reach Kafka before the offset is stored. A skipped {skipped}"
        " duplicates and drifts by {drift_right}. B applied them a second time and is off by {drift_naive} in"
        " {drifting_keys} accounts.",
    ),
    3: Question(
        "Exactly-once is on, and the worker is killed in the same way. How many duplicates reach the topic?",
        ["None", "As many as before", "Fewer, but some"],
        0,
        "{topic_duplicates} were measured. Connect writes records and offset in one Kafka transaction, so they are"
        " there together or not at all. B still drifts by {drift_naive}, which it had before: nothing repairs it.",
    ),
    4: Question(
        "Exactly-once stays on. Now the sinks are killed after their database has committed and before Spark has noted"
        " it. Which sink survives the replay of that batch?",
        ["Both: exactly-once is on", "A, which remembers ids in the same transaction", "Neither"],
        1,
        "A skipped {skipped} events and drifts by {drift_right}. B applied the batch twice and is off by {drift_naive}."
        " The topic got {topic_duplicates} new duplicates: Kafka's exactly-once ends at Kafka, and the crash was behind"
        " it.",
    ),
    5: Question(
        "So where does exactly-once processing come from?",
        [
            "From Connect's exactly-once",
            "From Spark's checkpoint",
            "From at-least-once transport and a sink that is idempotent",
        ],
        2,
        "From both together. After every fault A drifts by {drift_right}, because it writes event id and result in one"
        " transaction. B, on the same topic, drifts by {drift_naive}.",
    ),
}


def _text(value: str | int | Decimal | None) -> str:
    return "an unknown sum" if value is None else value if isinstance(value, str) else f"{value:,}"


class PageScreen(Screen):
    """The terminal's screen, whose lines also go to the page."""

    def __init__(self, hub: Hub) -> None:
        super().__init__()
        self._hub = hub

    def title(self, text: str) -> None:
        super().title(text)
        self._add("title", text)

    def say(self, text: str) -> None:
        super().say(text)
        self._add("say", text)

    def progress(self, text: str) -> None:
        super().progress(text)
        self._add("progress", text)

    def expect(self, held: bool, claim: str, found: str) -> None:
        super().expect(held, claim, found)
        self._hub.publish(logs={"lines": [{"kind": "expect", "text": claim, "found": found, "held": held}]})

    def address(self, url: str) -> None:
        """Where the page is. The address has the token, so the terminal alone shows it."""
        super().say(f"watch it, and break it, in a browser: {url}")

    def _add(self, kind: str, text: str) -> None:
        if text.strip():
            self._hub.publish(logs={"lines": [{"kind": kind, "text": text.strip()}]})


class Lesson:
    """Plays a story on the page. One at a time; the thread that plays it waits before a step while it is paused."""

    def __init__(self, hub: Hub, mark: Callable[[str, str], None], played: Callable[[int], None]) -> None:
        """``mark`` notes a moment on the plot, by its kind and text. ``played`` is called after each step."""
        self._hub, self._mark, self._played = hub, mark, played
        self._go_on = threading.Event()
        self._is_paused = False
        self._shown: dict[str, Any] = {}

    def play(self, story: Story, screen: Screen, *, paused: bool) -> None:
        """Play all steps. ``paused``: wait before each question until somebody goes on."""
        self._is_paused = paused
        self._go_on.clear()
        self._hub.clear_log("lines")
        steps = story.steps
        self._shown = {"steps": [step.title for step in steps], "done": 0, "answers": {}, "failed": None}
        self._show(phase="ready", step=0)
        try:
            for number, step in enumerate(steps):
                self._wait(number)
                self._show(phase="playing", step=number)
                self._mark("lesson", step.title)
                screen.title(step.title)
                step.play()
                self._played(number)
                self._shown["done"] = number + 1
                if number in QUESTIONS and story.phases:
                    answers = {**self._shown["answers"], str(number): QUESTIONS[number].explain(story.phases[-1])}
                    self._shown["answers"] = answers
                self._show(phase="played", phases=[_phase(phase) for phase in story.phases])
            self._show(phase="over", failed=screen.failed)
        except BaseException as error:
            self._show(phase="failed", failed=str(error).splitlines()[0] if str(error) else "interrupted")
            raise

    def pause(self) -> None:
        """Wait before the next step."""
        self._is_paused = True
        self._show(paused=True)

    def resume(self) -> None:
        """Play on without waiting."""
        self._is_paused = False
        self._go_on.set()
        self._show(paused=False)

    def step(self) -> None:
        """Play the next step, and wait again."""
        self._is_paused = True
        self._go_on.set()

    def _wait(self, number: int) -> None:
        """Ask the question of a step, and wait if the lesson is paused."""
        asked = QUESTIONS.get(number)
        question = {"text": asked.text, "options": list(asked.options), "right": asked.right} if asked else None
        self._show(step=number, question=question, phase="asking", paused=self._is_paused)
        while self._is_paused and not self._go_on.wait(WAIT_S):
            pass
        self._go_on.clear()

    def _show(self, **changes: Any) -> None:
        self._shown.update(changes)
        self._hub.publish({"lesson": dict(self._shown)})


def _phase(phase: Phase) -> dict[str, Any]:
    return {name: value if value is None else str(value) for name, value in asdict(phase).items()}
