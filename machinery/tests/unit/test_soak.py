"""The soak: its verdict, on runs written by hand, empty, sound, and wrong in one way each; and what the soak is without
the parts that it breaks: nemesis, keeper, a run that breaks off, clients, page.
"""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import psutil
import pytest
from click.testing import CliRunner

from outbox.base import project
from outbox.base.errors import Failure
from outbox.base.settings import Settings, load
from outbox.base.wait import nothing, wait_for
from outbox.sink.comparison_files import AddsLine
from outbox_lab.commands.soak import soak
from outbox_lab.soak import Request, clients, domain, nemesis, run, testbed
from outbox_lab.soak.clients import Clients
from outbox_lab.soak.faults import FAULTS
from outbox_lab.soak.history import (
    SET_UP,
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
from outbox_lab.soak.nemesis import Fault, Nemesis, Strike, Watch, wait_or_not_fired
from outbox_lab.soak.observe import forgotten
from outbox_lab.soak.record import Folder, Plan, RunRecord
from outbox_lab.soak.testbed import LINKS
from outbox_lab.stack.process import Process
from outbox_lab.testing import chosen_seed
from outbox_lab.testing.failures import raises
from tests.support.paths import ROOT

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


def promises_broken_by(run: RunRecord) -> dict[str, int]:
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
    assert promise in promises_broken_by(record(seen))


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
EXPECTS = {"key": None, "expected": (OK,)}
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
    assert promises_broken_by(run) == {}
    assert judge(run).repeats == 1


def test_release_explains_one_block_of_repeats_per_partition() -> None:
    block = [replace(one, offset=one.offset + 10) for one in EVENTS]
    elsewhere = [replace(event(number, 1, 0, key="b"), partition=1) for number in (8, 9)]
    again = [replace(one, offset=5) for one in elsewhere]
    once = events(*EVENTS, *block, *elsewhere, *again)
    twice = events(*EVENTS, *block, event(4, 4, 20), replace(EVENTS[0], offset=30))
    assert ONCE_ON_TOPIC not in promises_broken_by(record(replace(once, released={"orders": 1})))
    assert promises_broken_by(record(replace(twice, released={"orders": 1})))[ONCE_ON_TOPIC] == 2
    assert ONCE_ON_TOPIC not in promises_broken_by(record(replace(twice, released={"orders": 2})))


@pytest.mark.parametrize("again", [(*EVENTS, EVENTS[2]), EVENTS[1::-1], EVENTS[::2]], ids=["twice", "order", "gap"])
def test_release_explains_only_its_records_in_order(again: tuple[TopicEvent, ...]) -> None:
    repeats = [replace(one, offset=10 + number) for number, one in enumerate(again)]
    assert ONCE_ON_TOPIC in promises_broken_by(record(events(*EVENTS, *repeats, released={"orders": 1})))


@pytest.mark.parametrize(
    ("repeats", "counted", "total"),
    [("all", None, 13), ("re-reads", None, 20), ("none", applied(3, 2, 1), 13 + 2 * 5 + 7)],
)
def test_the_drift_is_what_the_strategy_does_not_recognise(repeats: str, counted: Any, total: int) -> None:
    for difference, found in ((0, {}), (1, {TOTALS: 1}), (-1, {TOTALS: 1})):
        seen = replace(having(total + difference, repeats, applied=counted), events=REPEATED, released={"orders": 1})
        assert promises_broken_by(record(seen)) == found


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
LOST = Checked("before sink-rewound", problems=[Problem("events-lost", "1 event lost")])
TWO = replace(PLAN, faults=["kafka-killed", "prune"])
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


# The nemesis ---------------------------------------------------------------------------------------------------------


def test_a_seed_decides_the_order_and_every_fault_comes_before_one_comes_again() -> None:
    seed, count = chosen_seed(), len(FAULTS)
    first, second = (list(islice(nemesis.draws(seed, FAULTS, 5), 2 * count)) for _ in range(2))
    assert first == second != list(islice(nemesis.draws(seed + 1, FAULTS, 5), 2 * count))
    assert {one.fault for one in first[:count]} == {one.fault for one in first[count:]} == set(FAULTS)
    assert {one.is_beside for one in first} == {False, True}, "some begin beside others, and some alone"


@pytest.fixture
def unstarted(tmp_path: Path) -> testbed.Testbed:
    """A testbed without sinks, of which nothing runs."""
    return testbed.Testbed(load(tmp_path, environment=False), [])


def miss(_: Strike) -> str:
    return wait_or_not_fired("somebody to be there", lambda: None, timeout_s=0.01)


def fail_to_heal(_: Strike) -> None:
    raise RuntimeError("it stays broken")


QUICK = Fault("quick", "Happens, and is over.", lambda _: "it happened", parts=("service",))


def broken(
    bed: testbed.Testbed, *faults: Fault, duration_s: float = 0.5, pause_s: float = 0.02, watch: Watch = nothing
) -> Nemesis:
    """The nemesis after a run with these faults."""
    breaker = Nemesis(bed, {one.name: one for one in faults}, chosen_seed(), print)
    breaker.run(duration_s, pause_s, watch)
    return breaker


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


def test_the_watch_ends_a_run_and_what_lasts_then_is_not_unhealable(unstarted: testbed.Testbed) -> None:
    lasting, said = list[str](), list[str]()

    def watch() -> None:
        if breaker.lasting and said:
            lasting.extend(breaker.lasting)
            raise ValueError("a client has died")

    long = replace(QUICK, name="long", lasts_s=(600.0, 600.0), heal=fail_to_heal)
    breaker = Nemesis(unstarted, {"long": long}, chosen_seed(), said.append)
    with pytest.raises(ValueError, match="a client has died"):
        breaker.run(duration_s=60, pause_s=0.02, watch=watch)
    assert [(one.evidence, one.is_healed, one.is_broken_off) for one in breaker.injections] == [
        ("it happened", False, True)
    ]
    assert (lasting, breaker.lasting) == (["long"], [])


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


@pytest.mark.parametrize("is_started_again", [False, True])
def test_a_process_that_ends_is_noted_once_between_two_looks(process: Process, is_started_again: bool) -> None:
    deaths: list[Death] = []
    watch = run.Watch({process.mark: process}, deaths)
    watch()
    child = run.leaders({process.mark})[process.mark][1]
    psutil.Process(child).kill()
    wait_for("the child to end", lambda: len(run.leaders({process.mark})[process.mark]) == 1, timeout_s=120)
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


# A run that breaks off -----------------------------------------------------------------------------------------------


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

    def __init__(self) -> None:
        self.count = 0
        self.answers: list[Any] = []

    def set_up(self, send: Callable[[Sequence[Request]], list[Any]]) -> None:
        send([Request("order", "/orders", {"pieces": 0}, (201,))])

    def plan(self) -> Request:
        self.count += 1
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


def test_old_keys_are_reused_for_the_same_and_another_request(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "REUSED", 1.0)
    monkeypatch.setattr(clients, "REPEATED", 0.0)
    folder, domain = Folder(settings.home), Orders()
    with closing(Recorder(folder.history_file)) as recorder:
        one = Clients(settings, domain, recorder, rate=2_000, seed=1)  # type: ignore[arg-type]
        one.set_up()
        with one.sending():
            wait_for("the clients", lambda: domain.count > 60, timeout_s=60, needs=one.require_running)
    found = folder.history
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


def test_what_is_wrong_with_a_project_is_said_and_nothing_is_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.outbox]\nsoak = 'smallest:Domain'\n")
    monkeypatch.setenv(project.VARIABLE, str(tmp_path))
    for words, code in (
        (["--faults", "kafka-killed,nothing-*"], "fault-unknown"),
        (["--seed", "1"], "soak-domain-missing"),
    ):
        with raises(code):
            CliRunner().invoke(soak, words, catch_exceptions=False)
    (tmp_path / "smallest.py").write_text(
        "class Domain:\n    sinks = ('orders',)\n    def __init__(self, seed): pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with raises("soak-domain-wrong"):  # it does not group its sinks
        domain.load(1)
    assert not (tmp_path / ".outbox").exists()
