"""The verdict of the soak, on runs written by hand: empty, sound, and wrong in one way each."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from outbox.sink.comparison_files import AddsLine
from outbox_lab.soak.history import (
    Attempt,
    Checked,
    ComparedTotals,
    Death,
    History,
    Injection,
    Problem,
    Recorder,
    Seen,
    Sink,
    Source,
    StoredAnswer,
    TopicEvent,
)
from outbox_lab.soak.judge import GRACE_S, LAST, judge
from outbox_lab.soak.observe import forgotten
from outbox_lab.soak.record import Folder, Plan, RunRecord

# A sound run: two orders with three events, a refusal, and an unknown outcome -----------------------------------------

OK, REFUSED, BROKEN = 201, 409, 503


class Domain:
    """Orders: order N has the key `key-N`, and one event for each of its lines."""

    sinks = (("totals",),)
    changes = ""
    invariants: Mapping[str, str] = MappingProxyType({})

    def change_of_answer(self, body: Any) -> str:
        return f"order {body['id']}"

    def change_of_event(self, event: TopicEvent) -> str:
        return f"order {event.data['order']}"

    def contradictions(self, history: History, events: dict[str, TopicEvent]) -> list[str]:
        known = {event.data["order"] for event in events.values()}
        return [read.path for read in history.reads if read.outcome == "failed" or read.answer["id"] not in known]


def attempt(number: int, status: int | None = OK, answer: Any = None, method: str = "POST") -> Attempt:
    key = f"key-{number}" if method == "POST" else None
    body = {"id": number} if answer is None and status == OK else answer
    return Attempt(0, "order", method, f"/orders/{number}", key, None, 0.0, 1.0, status, body)


def stored(number: int, status: int = OK) -> StoredAnswer:
    return StoredAnswer(f"key-{number}", status, {"id": number})


def event(
    number: int, version: int, offset: int, *, order_number: int = 1, key: str = "a", pieces: int = 0
) -> TopicEvent:
    data, numbers = {"order": order_number, "pieces": pieces}, {"pieces": Decimal(pieces)}
    return TopicEvent(f"event-{number}", "orders", 0, offset, key, "order.placed.v1", version, data, numbers)


EVENTS = (event(1, 1, 0, pieces=5), event(2, 2, 1, pieces=7), event(3, 3, 3, order_number=2, pieces=1))
ADDS = {"order.placed.v1": AddsLine(1, "pieces")}
DUE = {"a": Decimal(13)}
VERSIONS = {"a": 3}
ROWS = {"event-1": 1, "event-2": 1, "event-3": 1}
SOURCE = Source([stored(1), stored(2)], {"order 1": 2, "order 2": 1}, frozenset({"event-2", "event-3"}))
SEEN = Seen(EVENTS, SOURCE, [Sink("totals", comparisons=[ComparedTotals("totals", DUE, DUE, ADDS, VERSIONS)])])
SOLD_OUT = {"title": "sold out"}
READ = attempt(1, method="GET")
HISTORY = History((attempt(1), READ, attempt(2), attempt(3, REFUSED, SOLD_OUT), attempt(4, None)))
PLAN = Plan(1, 60.0, 30.0, 5.0, exactly_once=True, faults=[])
KILLED = Injection(
    "kafka-killed",
    "process 7 was killed",
    is_healed=True,
    fired_s=10.0,
    healed_s=20.0,
    parts=("kafka",),  # so sinks may have read records again
)


def record(seen: Seen = SEEN, history: History = HISTORY, plan: Plan = PLAN, **more: Any) -> RunRecord:
    """The record of a sound run with a fault, perhaps with something else in it."""
    return RunRecord(Domain(), plan, history, seen, **{"injections": [KILLED], **more})  # type: ignore[arg-type]


def broken(run: RunRecord) -> dict[str, int]:
    """The promises that do not hold, with the number of cases."""
    return {one.promise: one.cases for one in judge(run).findings}


# What is wrong in it --------------------------------------------------------------------------------------------------

# Promises, as the verdict words them.
ANSWER_TRUE = "an acknowledged change is there, a failed one is not"
READ_TRUE = "a read returns the truth"
ONCE_ON_TOPIC = "with exactly-once an event is on its topic once"
NOT_ASIDE = "totals sets no valid event aside"
APPLIES = "totals applies every record"
TOTALS = "totals has the totals that its strategy promises"
NO_LOSS = "the check finds no loss"
GOES_ON = "the service makes changes after the last fault"
KEY_REFUSED = "a used key is refused to another request"
HANDLED = {"comparisons": (), "types": {"order.placed.v1"}}
REPEATED = (*EVENTS, replace(EVENTS[1], offset=7))  # event 2 adds 7


# The state that the run left, with another source, sink, comparison, total, effects of a handler, or events.


def source(**changed: Any) -> Seen:
    return replace(SEEN, source=replace(SOURCE, **changed))


def also(*answers: StoredAnswer) -> Seen:
    return source(answers=[*SOURCE.answers, *answers])


def sink(**changed: Any) -> Seen:
    return replace(SEEN, sinks=[replace(SEEN.sinks[0], **changed)])


def compared(totals: Mapping[str, Decimal] = DUE, repeats: Any = "all", **changed: Any) -> Seen:
    one = replace(ComparedTotals("totals", totals, DUE, ADDS, VERSIONS), **changed)
    return sink(comparisons=[one], repeats=repeats)


def having(total: int, repeats: Any = "all", **changed: Any) -> Seen:
    seen = compared({"a": Decimal(total)}, repeats)
    return replace(seen, sinks=[replace(seen.sinks[0], **changed)])


def effects(*ids: str) -> Seen:
    return sink(**HANDLED, effects={"a": ids})


def events(*changed: TopicEvent, **more: Any) -> Seen:
    return replace(SEEN, events=changed, **more)


def repeated(**changed: Any) -> Seen:
    """Event 2 is there twice, once changed. A transaction was released, so it may be twice."""
    return events(*EVENTS, replace(EVENTS[1], offset=7, **changed), released={"orders": 1})


def applied(*times: int) -> dict[str, int]:
    """How often a sink has applied events 1, 2 and 3."""
    return {f"event-{number}": count for number, count in enumerate(times, start=1) if count}


def then(*attempts: Attempt) -> History:
    """The sound history, and then these attempts."""
    return History((*HISTORY.attempts, *attempts))


WRONG: dict[str, dict[str, Seen]] = {
    ANSWER_TRUE: {
        "an acknowledged change is lost": source(answers=[stored(1)]),
        "a failed change is there": also(stored(3)),
    },
    "a key is stored once": {"twice": source(answers=[stored(1), stored(1), stored(2)])},
    "a stored key was sent by a client": {"nobody sent it": also(stored(9))},
    "a change is whole: its answer and its rows": {
        "a change without its answer": source(answers=[stored(1)]),
        "an answer without its change": source(changes={"order 1": 2}),
    },
    "a change has its events, and an event its change": {
        "an event of two is lost": events(EVENTS[0], EVENTS[2]),
        "an event without a change": events(*EVENTS, event(4, 4, 9, order_number=9)),
    },
    "a change is made for one key": {"two keys": also(replace(stored(2), key="key-9"))},
    "the source has a change once": {"it has it twice": source(changed_twice=frozenset({"order 1"}))},
    "an event of the outbox is on its topic": {"it is not": events(*EVENTS[:2])},
    ONCE_ON_TOPIC: {"it is there twice": events(*REPEATED)},
    "a repeated event is the same event": {"other content": repeated(data={"order": 1, "pieces": 70})},
    "the versions of a key are 1, 2, 3 and so on, in this order": {
        "a gap": events(EVENTS[0], EVENTS[2]),
        "a wrong order": events(EVENTS[1], EVENTS[0], EVENTS[2]),
    },
    "the events of a key are on one partition": {"two": events(*EVENTS[:2], replace(EVENTS[2], partition=1))},
    "no money is lost": {"an invariant": source(violations={"no money is lost": ["5 is lost"]})},
    NOT_ASIDE: {"one is": having(12, set_aside=frozenset({"event-3"}))},
    "totals remembers every event": {"one is forgotten": sink(forgotten=frozenset({"event-2"}))},
    TOTALS: {
        "a total too low": having(6),
        "a key without a total": compared({}),
        "a naive sink with too little drift": having(20, "none", applied=applied(2, 2, 1)),
        "an event lost behind another one of the same size": compared(versions={"a": 2}),
        "events that do not add up to the source": compared(source={"a": Decimal(14)}),
    },
    APPLIES: {
        "an event is lost behind a right total": having(13, "none", applied=applied(1, 1)),
        "an event that no topic has": having(13, "none", applied={**ROWS, "event-9": 1}),
    },
    "totals has every event once": {
        "a table lacks one, behind a right total": sink(rows={**ROWS, "event-2": 0}),
        "a table has one twice": sink(rows={**ROWS, "event-2": 2}),
        "a handler has missed one": effects("event-1", "event-3"),
        "a handler was called twice in effect": effects("event-1", "event-2", "event-2", "event-3"),
    },
    "totals has the events of a key in their order": {
        "another order": effects("event-1", "event-3", "event-2"),
        "another key": sink(**HANDLED, effects={"a": ["event-1", "event-2"], "b": ["event-3"]}),
    },
}


@pytest.mark.parametrize(
    ("promise", "seen"),
    [pytest.param(promise, seen, id=name) for promise, cases in WRONG.items() for name, seen in cases.items()],
)
def test_what_is_wrong_is_found(promise: str, seen: Seen) -> None:
    assert promise in broken(record(seen))


# Answers, deaths and checks ----------------------------------------------------------------------------------------


def silent(status: int | None, count: int = LAST) -> list[Attempt]:
    return [attempt(number, status) for number in range(100, 100 + count)]


def answered(*attempts: Attempt, **changed: Any) -> RunRecord:
    """The sound run, and then these attempts, perhaps changed."""
    return record(history=then(*(replace(one, **changed) for one in attempts)))


def died(process: str, at_s: float, *parts: str, **more: Any) -> RunRecord:
    """A process has ended; from 10 to 20 s there was a fault of these parts."""
    alive_s = more.pop("alive_s", None)
    fault = replace(KILLED, parts=parts)
    return record(deaths=[Death(process, at_s, alive_s=alive_s)], injections=[fault], **more)


def reported(problem: Problem, duplicates: int = 0, repeats: Any = "all") -> RunRecord:
    """`outbox check` has found a problem, before a rebuild repaired it."""
    checks = [Checked("before sink-rewound", duplicates, [problem]), Checked("at the end")]
    return record(Seen(sinks=[Sink("totals", repeats)]), History(), injections=SENT, checks=checks)


def problem(code: str) -> Problem:
    return Problem(code, "something is wrong", "totals")


SENT = [replace(KILLED, invalid=2), replace(KILLED, invalid=3)]
MISSED = Injection("kafka-killed", problem="it did not run", is_healed=True)
LEFT = replace(KILLED, is_healed=False)
READ, EXPECTS = attempt(1, method="GET"), {"key": None, "expected": (OK,)}
READS = [READ] * LAST
MISUSE = replace(attempt(1), body={"pieces": 9})
LATE = 20.0 + GRACE_S
ENDS = "a process ends only by a fault"
EXPECTED = "a request has a status that the domain expects"
SENT_INVALID = "an invalid record is one of a fault"
RUNS: dict[str, list[RunRecord]] = {
    "a fault that began has happened": [record(injections=[MISSED, KILLED])],
    "a fault is healed": [record(injections=[LEFT, KILLED])],
    "a key is answered once": [answered(attempt(2, OK, {"id": 22}))],
    READ_TRUE: [
        answered(attempt(9, OK, {"id": 9}, method="GET")),
        answered(attempt(1, 404, {"title": "no such order"}, method="GET")),
    ],
    KEY_REFUSED: [answered(MISUSE)],
    EXPECTED: [answered(attempt(9, REFUSED, {"id": 9}), **EXPECTS)],
    GOES_ON: [
        answered(*silent(BROKEN)),
        answered(*silent(BROKEN), *READS),  # reads say nothing
        answered(*silent(BROKEN), *silent(REFUSED, 3)),  # nor do refusals
    ],
    ENDS: [
        died("sinks-1", LATE + 1, "sinks"),
        died("sinks-1", 15.0, "service", "connect"),
        died("postgres", 15.0, "sinks"),
        died("connector", 200.0, "connector", alive_s=LATE + 1),  # when it was last seen alive
    ],
    NO_LOSS: [
        reported(problem("events-lost")),
        reported(problem("sink-drift"), duplicates=3),
        reported(problem("sink-drift"), repeats="re-reads"),
    ],
    SENT_INVALID: [record(injections=SENT, checks=[Checked("at the end", malformed=6)])],
    "the sinks catch up": [record(checks=[Checked("at the end", in_flight="sink totals is 3 events behind")])],
}


@pytest.mark.parametrize(("promise", "run"), [(promise, run) for promise, runs in RUNS.items() for run in runs])
def test_a_run_breaks_one_promise(promise: str, run: RunRecord) -> None:
    assert [(one.promise, one.cases) for one in judge(run).findings] == [(promise, 1)]


# Repeats -----------------------------------------------------------------------------------------------------------


def test_a_repeat_is_allowed_where_the_relay_may_repeat() -> None:
    run = record(events(*REPEATED), plan=replace(PLAN, exactly_once=False))
    assert broken(run) == {}
    assert judge(run).repeats == 1


def test_release_explains_one_block_of_repeats_per_partition() -> None:
    block = [replace(one, offset=one.offset + 10) for one in EVENTS]
    elsewhere = [replace(event(number, 1, 0, key="b"), partition=1) for number in (8, 9)]
    again = [replace(one, offset=5) for one in elsewhere]
    once = events(*EVENTS, *block, *elsewhere, *again)
    twice = events(*EVENTS, *block, event(4, 4, 20), replace(EVENTS[0], offset=30))
    assert ONCE_ON_TOPIC not in broken(record(replace(once, released={"orders": 1})))
    assert broken(record(replace(twice, released={"orders": 1})))[ONCE_ON_TOPIC] == 2
    assert ONCE_ON_TOPIC not in broken(record(replace(twice, released={"orders": 2})))


@pytest.mark.parametrize("again", [(*EVENTS, EVENTS[2]), EVENTS[1::-1], EVENTS[::2]], ids=["twice", "order", "gap"])
def test_release_explains_only_its_records_in_order(again: tuple[TopicEvent, ...]) -> None:
    repeats = [replace(one, offset=10 + number) for number, one in enumerate(again)]
    assert ONCE_ON_TOPIC in broken(record(events(*EVENTS, *repeats, released={"orders": 1})))


@pytest.mark.parametrize(
    ("repeats", "counted", "total"),
    [("all", None, 13), ("re-reads", None, 20), ("none", applied(3, 2, 1), 13 + 2 * 5 + 7)],
)
def test_the_drift_is_what_the_strategy_does_not_recognise(repeats: str, counted: Any, total: int) -> None:
    for difference, found in ((0, {}), (1, {TOTALS: 1}), (-1, {TOTALS: 1})):
        seen = replace(having(total + difference, repeats, applied=counted), events=REPEATED, released={"orders": 1})
        assert broken(record(seen)) == found


@pytest.mark.parametrize(
    ("kept", "lacking"),
    [
        ({}, {"event-2", "event-3"}),
        ({"horizon": "event-3"}, {"event-3"}),
        ({"bases": {"orders": {"a": 2}}}, {"event-3"}),
        ({"bases": {"orders": {"b": 9}, "others": {"a": 9}}}, {"event-2", "event-3"}),
    ],
    ids=["all", "below the horizon", "taken from the source", "of other keys"],
)
def test_what_a_strategy_forgot(kept: dict[str, Any], lacking: set[str]) -> None:
    assert forgotten(EVENTS, {"order.placed.v1"}, {"event-1"}, **kept) == lacking
    assert not forgotten(EVENTS, {"order.cancelled.v1"}, set(), **kept)
    assert not forgotten(EVENTS, {"order.placed.v1"}, {one.id for one in EVENTS}, **kept)


# The verdict, and the files ----------------------------------------------------------------------------------------

ANSWERED_NOTHING = then(attempt(1, OK, "nothing", method="GET"))
TWO = replace(PLAN, faults=["kafka-killed", "prune"])
LOST = Checked("before sink-rewound", problems=[Problem("events-lost", "1 event lost")])
DRIFT = Checked("before sink-rewound", problems=[Problem("sink-drift", "perhaps of a naive sink", "totals")])


BROKE_OFF = "Kafka is unavailable"
VERDICTS: dict[str, tuple[RunRecord, str, str]] = {
    "sound": (record(), "", "valid"),
    "wrong": (record(having(20)), "", "invalid"),
    "empty": (record(Seen(), History()), "", "unknown"),
    "an invalid answer to a read": (record(history=ANSWERED_NOTHING), "", "unknown"),
    "nothing succeeded": (record(Seen(sinks=SEEN.sinks[:0]), History(HISTORY.attempts[3:])), "", "unknown"),
    "no read succeeded": (record(history=History(HISTORY.attempts[::2])), "", "unknown"),
    "no fault happened": (record(injections=[], plan=TWO), "", "unknown"),
    "broken off": (record(Seen(), History()), BROKE_OFF, "unknown"),
    "broken off, a fault is not healed": (record(Seen(), History(), injections=[LEFT]), BROKE_OFF, "invalid"),
    "broken off before a fault could be healed": (
        record(Seen(), History(), injections=[replace(LEFT, is_broken_off=True)]),
        BROKE_OFF,
        "unknown",
    ),
    "broken off after a loss": (record(Seen(), History(), checks=[LOST]), BROKE_OFF, "invalid"),
    "broken off after drift": (record(Seen(), History(), checks=[DRIFT]), BROKE_OFF, "unknown"),
}


@pytest.mark.parametrize(("run", "broke_off", "result"), VERDICTS.values(), ids=VERDICTS)
def test_the_verdict(run: RunRecord, broke_off: str, result: str) -> None:
    verdict = judge(run, broke_off)
    assert verdict.result == result
    assert broke_off in verdict.why_unknown
    assert "prune" in verdict.not_happened or run.plan is PLAN


def test_a_finding_or_a_checker_that_fails_hides_no_other() -> None:
    verdict = judge(record(having(12, set_aside=frozenset({"event-3"})), ANSWERED_NOTHING))
    assert (verdict.result, {one.promise for one in verdict.findings}) == ("invalid", {NOT_ASIDE, TOTALS})
    assert READ_TRUE in verdict.why_unknown


def test_the_record_of_a_run_is_the_same_after_it_was_kept_in_files(tmp_path: Path) -> None:
    seen = replace(SEEN, events=[*EVENTS], released={"orders": 2})
    plan = replace(PLAN, exactly_once=False, faults=["kafka-killed"], timeout_scale=2.0)
    deaths = [Death("sinks-0", 12.0, "killed")]
    checks = [Checked("at the end", 1, [Problem("sink-drift", "drifts", "totals")], "nothing")]
    sent = replace(attempt(1), body={"name": "\ud800"}, expected=[OK])  # half of a surrogate pair
    expected = record(seen, History((sent,)), plan, injections=SENT, deaths=deaths, checks=checks)
    folder = Folder(tmp_path)
    for name, content in {"run": plan, "injections": SENT, "deaths": deaths, "checks": checks}.items():
        folder.write(f"{name}.json", content)
    folder.write_seen(seen)
    with closing(Recorder(folder.history_file)) as recorder:
        recorder.add(sent)
    assert folder.record(expected.domain) == expected
    assert len((tmp_path / "events.jsonl").read_bytes().splitlines()) == len(EVENTS)
