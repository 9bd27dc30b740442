"""The lesson: the steps of the walkthrough, each with a question before it and a measured answer after it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from decimal import Decimal
from typing import Any

from outbox_lab.walkthrough import Phase, Screen, Story

from demo.page.hub import Hub

WAIT_S = 0.2  # how often a wait looks whether Ctrl-C came
Phases = Sequence[Phase]


@dataclass(frozen=True)
class Question:
    """A question of the quiz. The answer names fields of the phase that was measured: ``{drift_naive}``.

    ``measured`` returns the index of the option that the phases show, the last of them being the question's own; None
    if they show another result than each of the options.
    """

    text: str
    options: Sequence[str]
    measured: Callable[[Phases], int | None]
    answer: str

    def explain(self, phases: Phases) -> dict[str, Any]:
        """The answer: which option is right, and the explanation with what was measured."""
        text = self.answer.format_map({name: _text(value) for name, value in asdict(phases[-1]).items()})
        return {"right": self.measured(phases), "text": text}


def _quiet(phases: Phases) -> int | None:
    phase = phases[-1]
    if phase.topic_duplicates:
        return 2
    if phase.drift_right or phase.drift_naive is None:  # None: there is no sink B
        return None
    return 0 if phase.drift_naive else 1


def _at_least_once(phases: Phases) -> int:
    return 2 if phases[-1].topic_duplicates else 1


def _exactly_once(phases: Phases) -> int | None:
    before, now = (one.topic_duplicates for one in phases[-2:])
    if not now:
        return 0
    return 1 if now >= before else 2


def _crash(phases: Phases) -> int | None:
    if phases[-1].drift_naive is None:
        return None
    is_naive_hit = phases[-1].drift_naive != phases[-2].drift_naive
    if phases[-1].drift_right:
        return 2 if is_naive_hit else None
    return 1 if is_naive_hit else 0


def _strategies(phases: Phases) -> int | None:
    """By phase 2, where events were sent again, and phase 4, where they were read again."""
    quiet, resent, steady, reread = phases
    hits = [
        (resent.drift_right != quiet.drift_right, resent.drift_naive != quiet.drift_naive),
        (reread.drift_right != steady.drift_right, reread.drift_naive != steady.drift_naive),
    ]
    known = {
        ((False, True), (False, True)): 0,
        ((False, False), (False, True)): 1,
        ((False, True), (False, False)): 2,
    }
    return known.get((hits[0], hits[1]))


# By the place of a step in the story: 0 starts the chain, the last is the verdict.
QUESTIONS: dict[int, Question] = {
    1: Question(
        "Hundreds of transfers, and no fault. Two sinks read the same topic: A remembers event ids, B adds up whatever"
        " comes. Which one agrees with the ledger?",
        ["Only A", "Both", "Neither: Kafka always delivers some events twice"],
        _quiet,
        "{topic_duplicates} duplicates came to the topic; A drifts by {drift_right}, B by {drift_naive}. Nothing is"
        " repeated without a fault, so a test without faults finds no difference between the two.",
    ),
    2: Question(
        "Exactly-once is off. The Connect worker is killed while it relays, and starts again. What does Debezium do?",
        [
            "It loses the events that were under way",
            "It reads on exactly where it stopped",
            "It sends some events again, because their offsets were not stored",
        ],
        _at_least_once,
        "It sent {topic_duplicates} events again: records reach Kafka before the offset is stored. A skipped {skipped}"
        " duplicates and drifts by {drift_right}. B applied them a second time and is off by {drift_naive} in"
        " {drifting_keys} accounts.",
    ),
    3: Question(
        "Exactly-once is on, and the worker is killed in the same way. How many duplicates reach the topic?",
        ["None", "As many as before", "Fewer, but some"],
        _exactly_once,
        "{topic_duplicates} were measured. Connect writes records and offset in one Kafka transaction: they are there"
        " together or not at all. B drifts by {drift_naive}: nothing repairs the drift that it had before.",
    ),
    4: Question(
        "Exactly-once stays on. Now the sinks are killed after their database has committed and before Spark has noted"
        " it. Which sink survives the replay of that batch?",
        ["Both: exactly-once is on", "A, which remembers ids in the same transaction", "Neither"],
        _crash,
        "A skipped {skipped} events and drifts by {drift_right}. B applied the batch twice and is off by {drift_naive}."
        " The topic got {topic_duplicates} new duplicates: Kafka's exactly-once ends at Kafka, and the crash was behind"
        " it.",
    ),
    5: Question(
        "Events came twice in two ways: Debezium sent them again in step 2, and Spark read them again in step 4. Which"
        " strategy survives which?",
        [
            "`dedup` (A) survives both, `naive` (B) neither",
            "Both survive the resent events, only `dedup` the batch that was read again",
            "Only `dedup` survives the resent events, both the batch that was read again",
        ],
        _strategies,
        "After both, A drifts by {drift_right} and B by {drift_naive}. A writes event id and result in one transaction,"
        " so it recognises a repeat wherever it comes from. At-least-once transport and an idempotent sink together are"
        " exactly-once processing.",
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

    def address(self, url: str, note: str = "") -> None:
        """Where the page is. The address has the token, so the terminal alone shows it."""
        super().say(f"watch it, and break it, in a browser: {url}{note}")

    def _add(self, kind: str, text: str) -> None:
        if text.strip():
            self._hub.publish(logs={"lines": [{"kind": kind, "text": text.strip()}]})


class Lesson:
    """Plays a story on the page. One at a time; the thread that plays it waits before a step while it is paused.

    Other threads pause, resume and step it. Each of these returns False if there is nothing to do now.
    """

    def __init__(self, hub: Hub, mark: Callable[[str, str], None], played: Callable[[int], None]) -> None:
        """``mark`` notes a moment on the plot, by its kind and text. ``played`` is called after each step."""
        self._hub, self._mark, self._played = hub, mark, played
        self._changed = threading.Condition()  # guards all that follows
        self._is_playing = False
        self._is_paused = False
        self._is_asking = False  # it waits before a step
        self._runs = 0
        self._shown: dict[str, Any] = {}

    def play(self, story: Story, screen: Screen, *, paused: bool) -> None:
        """Play all steps. ``paused``: wait before each question until somebody goes on."""
        steps = story.steps
        with self._changed:
            self._is_playing, self._is_paused = True, paused
            self._runs += 1
            titles = [step.title for step in steps]
            self._shown = {"run": self._runs, "steps": titles, "done": 0, "answers": {}, "failed": None}
            self._hub.clear_log("lines")
            self._show(phase="ready", step=0, paused=paused)
        try:
            for number, step in enumerate(steps):
                self._wait(number)
                self._show(phase="playing", step=number)
                self._mark("lesson", step.title)
                screen.title(step.title)
                step.play()
                self._played(number)
                self._tell(number, story, screen)
            self._end("over", screen.failed)
        except BaseException as error:
            self._end("failed", str(error).splitlines()[0] if str(error) else "interrupted")
            raise

    def pause(self) -> bool:
        """Wait before the next step."""
        with self._changed:
            if self._is_playing:
                self._is_paused = True
                self._show(paused=True)
            return self._is_playing

    def resume(self) -> bool:
        """Play on without waiting."""
        with self._changed:
            if self._is_playing:
                self._is_paused = False
                self._show(paused=False)
                self._changed.notify_all()
            return self._is_playing

    def step(self) -> bool:
        """Play the step whose question is asked, and wait again."""
        with self._changed:
            has_asked = self._is_asking
            self._is_asking = False
            self._changed.notify_all()
            return has_asked

    def _wait(self, number: int) -> None:
        """Ask the question of a step, and wait if the lesson is paused."""
        asked = QUESTIONS.get(number)
        question = {"text": asked.text, "options": list(asked.options)} if asked else None
        with self._changed:
            self._is_asking = True
            self._show(step=number, question=question, phase="asking")
            while self._is_asking and self._is_paused:
                self._changed.wait(WAIT_S)
            self._is_asking = False

    def _tell(self, number: int, story: Story, screen: Screen) -> None:
        """Show what a step has measured."""
        with self._changed:
            if number in QUESTIONS and story.phases:
                answer = QUESTIONS[number].explain(story.phases)
                self._shown["answers"] = {**self._shown["answers"], str(number): answer}
            phases = [_phase(phase) for phase in story.phases]
            self._show(phase="played", done=number + 1, phases=phases, failed=screen.failed)

    def _end(self, phase: str, failed: str | None) -> None:
        with self._changed:
            self._is_playing = False
            self._show(phase=phase, failed=failed)

    def _show(self, **changes: Any) -> None:
        with self._changed:
            self._shown.update(changes)
            self._hub.publish({"lesson": dict(self._shown)})


def _phase(phase: Phase) -> dict[str, Any]:
    return {name: value if value is None else str(value) for name, value in asdict(phase).items()}
