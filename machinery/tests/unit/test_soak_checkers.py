"""The checkers of the soak, on histories written by hand: empty, sound, and wrong in one way each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from decimal import Decimal
from http import HTTPStatus
from types import MappingProxyType
from typing import Any

import msgspec
import pytest

from outbox.soak.checkers import answers, arrival, changes, faults, invariants, order, reads, results
from outbox.soak.history import Attempt, History
from outbox.soak.injection import Injection, Planned
from outbox.soak.seen import Answer, Comparison, Event, Seen, Sink, Source
from outbox.soak.verdict import judge

OK, REFUSED, BROKEN = 201, 409, 503


class Domain:
    """Orders: order N has the key `key-N`, and one event for each of its lines."""

    sinks = (("totals",),)
    changes = ""
    invariants: Mapping[str, str] = MappingProxyType({})

    def change_of_answer(self, body: Any) -> str:
        return f"order {body['id']}"

    def change_of_event(self, event: Event) -> str:
        return f"order {event.data['order']}"

    def contradictions(self, history: History, events: dict[str, Event]) -> list[str]:
        known = {event.data["order"] for event in events.values()}
        return [read.path for read in history.reads if read.answer["id"] not in known]


def attempt(number: int, status: int | None = OK, answer: Any = None, method: str = "POST") -> Attempt:
    key = f"key-{number}" if method == "POST" else None
    body = {"id": number} if answer is None and status == OK else answer
    return Attempt(0, "order", method, f"/orders/{number}", key, None, 0.0, 1.0, status, body)


def stored(number: int, status: int = OK) -> Answer:
    return Answer(f"key-{number}", status, {"id": number})


def event(number: int, version: int, offset: int, *, order_number: int = 1, key: str = "a") -> Event:
    return Event(f"event-{number}", "orders", 0, offset, key, "order.placed.v1", version, {"order": order_number})


EVENTS = (event(1, 1, 0), event(2, 2, 1), event(3, 3, 3, order_number=2))
ADDS = {"event-1": Decimal(5), "event-2": Decimal(7), "event-3": Decimal(1)}
DUE = {"a": Decimal(13)}
SOURCE = Source([stored(1), stored(2)], {"order 1": 2, "order 2": 1}, frozenset({"event-2", "event-3"}))
SEEN = Seen(EVENTS, SOURCE, [Sink("totals", comparisons=[Comparison("totals", DUE, DUE, ADDS)])])
HISTORY = History((attempt(1), attempt(2), attempt(3, REFUSED, {"title": "sold out"}), attempt(4, None)))
REPEATED = (*EVENTS, replace(EVENTS[1], offset=7))  # event 2 adds 7

Check = Callable[[History, Seen], list[Any]]
CHECKS: dict[str, Check] = {
    "answers": lambda history, seen: answers.check(history, seen.source),
    "changes": lambda _, seen: changes.check(Domain(), seen),  # type: ignore[arg-type]
    "arrival": lambda _, seen: arrival.check(seen, may_repeat=False),
    "order": lambda _, seen: order.check(seen),
    "invariants": lambda _, seen: invariants.check(seen.source),
    "reads": lambda history, seen: reads.check(Domain(), history, seen),  # type: ignore[arg-type]
    "results": lambda _, seen: results.check(seen),
}


def cases(checker: str, history: History = HISTORY, seen: Seen = SEEN) -> int:
    """How many cases a checker finds."""
    return sum(finding.cases for finding in CHECKS[checker](history, seen))


def source(**changed: Any) -> Seen:
    """What was left, with another source."""
    return replace(SEEN, source=replace(SOURCE, **changed))


def sink(**changed: Any) -> Seen:
    """What was left, with another sink."""
    return replace(SEEN, sinks=[replace(SEEN.sinks[0], **changed)])


def having(total: int, repeats: Any = "all", **changed: Any) -> Seen:
    """What was left, with another total of the key, and perhaps another strategy."""
    return sink(comparisons=[Comparison("totals", {"a": Decimal(total)}, DUE, ADDS)], repeats=repeats, **changed)


@pytest.mark.parametrize("checker", CHECKS)
def test_an_empty_run_is_sound(checker: str) -> None:
    assert cases(checker, History(), Seen()) == 0


@pytest.mark.parametrize("checker", CHECKS)
def test_a_sound_run_is_sound(checker: str) -> None:
    assert cases(checker) == 0


@pytest.mark.parametrize(
    ("checker", "seen"),
    {
        "an acknowledged change is lost": ("answers", source(answers=[stored(1)])),
        "an acknowledged change is another": (
            "answers",
            source(answers=[stored(1), replace(stored(2), body={"id": 9})]),
        ),
        "a failed change is there": ("answers", source(answers=[stored(1), stored(2), stored(3)])),
        "a key that is stored twice": ("answers", source(answers=[stored(1), stored(1), stored(2)])),
        "a key that nobody sent": ("answers", source(answers=[stored(1), stored(2), stored(9)])),
        "a change without its answer": ("changes", source(answers=[stored(1)])),
        "an answer without its change": ("changes", source(changes={"order 1": 2})),
        "a change whose only event is lost": ("changes", replace(SEEN, events=EVENTS[:2])),
        "a change without an event": ("changes", replace(SEEN, events=EVENTS[:1] + EVENTS[2:])),
        "an event without a change": ("changes", replace(SEEN, events=(*EVENTS, event(4, 4, 9, order_number=9)))),
        "a change made twice": ("changes", source(answers=[stored(1), stored(2), replace(stored(2), key="key-9")])),
        "an event that is not on the topic": ("arrival", replace(SEEN, events=EVENTS[:2])),
        "an event that is on the topic twice": ("arrival", replace(SEEN, events=REPEATED)),
        "a gap": ("order", replace(SEEN, events=(EVENTS[0], EVENTS[2]))),
        "a wrong order": ("order", replace(SEEN, events=(EVENTS[1], EVENTS[0], EVENTS[2]))),
        "a version twice": ("order", replace(SEEN, events=(*EVENTS, event(4, 3, 9)))),
        "two partitions": ("order", replace(SEEN, events=(*EVENTS[:2], replace(EVENTS[2], partition=1)))),
        "an invariant": ("invariants", source(violations={"no money is lost": ["5 is lost"]})),
        "a total too low": ("results", having(6)),
        "a total too high": ("results", having(20)),
        "a key without a total": ("results", sink(comparisons=[Comparison("totals", {}, DUE, ADDS)])),
        "a total of nobody": ("results", sink(comparisons=[Comparison("totals", {**DUE, "b": Decimal(1)}, DUE, ADDS)])),
        "an event set aside": ("results", having(12, set_aside=frozenset({"event-3"}))),
        "a state that is wrong": ("results", sink(comparisons=[Comparison("totals", {"a": Decimal(1)}, DUE, None)])),
        "a naive sink that lost an event": (
            "results",
            having(12, "none", applied={"event-1": 1, "event-2": 1}),
        ),
        "a naive sink with too little drift": (
            "results",
            having(20, "none", applied={"event-1": 2, "event-2": 2, "event-3": 1}),
        ),
        "events that do not add up to the source": (
            "results",
            sink(comparisons=[Comparison("totals", DUE, {"a": Decimal(14)}, ADDS)]),
        ),
    }.values(),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_wrong_is_found(checker: str, seen: Seen) -> None:
    assert cases(checker, seen=seen) > 0


def test_a_refusal_and_a_change_that_needs_no_event_are_sound() -> None:
    answers_of_all = [*SOURCE.answers, stored(3, HTTPStatus.BAD_REQUEST), stored(4)]
    seen = source(answers=answers_of_all, changes={**SOURCE.changes, "order 4": 0})
    assert cases("answers", seen=seen) == cases("changes", seen=seen) == 0


def test_an_answer_that_contradicts_an_earlier_one_is_found() -> None:
    history = History((*HISTORY.attempts, attempt(2, OK, {"id": 22})))
    assert cases("answers", history) == 1


def test_a_read_that_the_events_contradict_is_found() -> None:
    history = History((*HISTORY.attempts, attempt(9, OK, {"id": 9}, method="GET")))
    assert cases("reads", history) == 1


@pytest.mark.parametrize("is_there", [True, False])
def test_an_unknown_change_may_be_there_or_not(is_there: bool) -> None:
    added = event(4, 4, 9, order_number=4)
    whole = replace(
        SEEN,
        events=(*EVENTS, added),
        source=replace(SOURCE, answers=[*SOURCE.answers, stored(4)], changes={**SOURCE.changes, "order 4": 1}),
    )
    seen = whole if is_there else SEEN
    assert cases("answers", seen=seen) == cases("changes", seen=seen) == cases("order", seen=seen) == 0


def test_an_unknown_change_that_is_half_there_is_found() -> None:
    assert cases("changes", seen=source(changes={**SOURCE.changes, "order 4": 1})) > 0
    assert cases("changes", seen=source(answers=[*SOURCE.answers, stored(4)])) > 0


def test_a_finding_hides_no_other() -> None:
    wrong = having(12, set_aside=frozenset({"event-3"}))
    assert cases("results", seen=wrong) == 2  # the event, and the total that lacks it
    assert cases("results", seen=replace(wrong, sinks=[*wrong.sinks, *SEEN.sinks])) == 2


def test_an_event_that_was_not_applied_is_found_though_the_total_is_right() -> None:
    assert cases("results", seen=having(13, "none", applied={"event-1": 1, "event-2": 1})) == 1


def test_an_event_that_no_comparison_counts_need_not_be_applied() -> None:
    asked_for = {name: ADDS[name] for name in ("event-1", "event-2")}
    totals = {"a": Decimal(12)}
    applied = {"event-1": 1, "event-2": 1}
    comparisons = [Comparison("totals", totals, totals, asked_for)]
    assert cases("results", seen=sink(comparisons=comparisons, repeats="none", applied=applied)) == 0


def test_an_answer_after_broken_ones_counts() -> None:
    history = History((attempt(1, BROKEN), attempt(1, None), attempt(1), attempt(2)))
    assert history.operations["key-1"].outcome == "ok"
    assert cases("answers", history) == 0
    assert cases("answers", history, source(answers=[stored(2)])) == 1


def test_a_repeat_is_allowed_where_the_relay_may_repeat() -> None:
    assert not arrival.check(replace(SEEN, events=REPEATED), may_repeat=True)
    assert not arrival.check(replace(SEEN, events=REPEATED, released=1), may_repeat=False)
    assert arrival.repeats(replace(SEEN, events=REPEATED)) == [REPEATED[-1]]


@pytest.mark.parametrize(
    ("repeats", "applied", "total"),
    [
        ("all", None, 13),
        ("re-reads", None, 20),  # a record that repeats an event is applied again
        ("none", {"event-1": 3, "event-2": 2, "event-3": 1}, 13 + 2 * 5 + 7),
    ],
)
def test_the_drift_is_what_the_strategy_does_not_recognise(repeats: str, applied: Any, total: int) -> None:
    exact = replace(having(total, repeats, applied=applied), events=REPEATED)
    assert cases("results", seen=exact) == 0
    assert cases("results", seen=replace(having(total + 1, repeats, applied=applied), events=REPEATED)) == 1


def test_a_fault_that_did_not_happen_or_was_not_healed_is_found() -> None:
    planned = Planned(1.0, 2.0, "kafka-killed")
    happened = Injection(planned, "process 7 was killed", is_healed=True)
    assert not faults.check([happened])
    missed = Injection(planned, problem="it did not run", is_healed=True)
    broken = replace(happened, is_healed=False)
    for one in (missed, broken):
        assert [found.examples for found in faults.check([one, happened])] == [[str(one)]]


def test_what_was_left_is_the_same_after_it_was_kept_in_a_file() -> None:
    assert msgspec.json.decode(msgspec.json.encode(SEEN), type=Seen).sinks == SEEN.sinks
    kept = msgspec.json.decode(msgspec.json.encode(SEEN), type=Seen)
    assert (kept.source, list(kept.events)) == (SEEN.source, list(SEEN.events))


@pytest.mark.parametrize(
    ("history", "seen", "result"),
    [
        (HISTORY, SEEN, "valid"),
        (HISTORY, having(20), "invalid"),
        (History(), Seen(), "unknown"),
        (History((attempt(3, REFUSED, {"title": "sold out"}), attempt(4, None))), Seen(), "unknown"),
    ],
    ids=["sound", "wrong", "empty", "nothing succeeded"],
)
def test_a_run_in_which_nothing_succeeded_is_not_valid(history: History, seen: Seen, result: str) -> None:
    assert judge(Domain(), history, seen, [], may_repeat=False).result == result  # type: ignore[arg-type]
