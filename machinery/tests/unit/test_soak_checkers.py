"""The checkers of the soak, on histories written by hand: empty, sound, and wrong in one way each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from outbox.sink.remembering.dead_letters import OLDER_THAN_HORIZON
from outbox_lab.soak.checked import Checked, Problem, of_report
from outbox_lab.soak.checkers import (
    answers,
    arrival,
    changes,
    checks,
    deaths,
    faults,
    foreign,
    invariants,
    order,
    reads,
    results,
)
from outbox_lab.soak.death import Death
from outbox_lab.soak.folder import Folder, Plan
from outbox_lab.soak.foreign import ForeignRecord
from outbox_lab.soak.history import SET_UP, History
from outbox_lab.soak.injection import Injection, Planned
from outbox_lab.soak.observe import Kept, forgotten
from outbox_lab.soak.seen import ComparedTotals, Foreign, Seen, Sink, StoredAnswer, TopicEvent
from outbox_lab.soak.verdict import RunRecord, broken_off, judge
from tests.support.soak_run import (
    ADDS,
    BROKEN,
    DUE,
    EVENTS,
    HISTORY,
    OK,
    REFUSED,
    ROWS,
    SEEN,
    SOLD_OUT,
    SOURCE,
    VERSIONS,
    Domain,
    attempt,
    event,
    stored,
)

REPEATED = (*EVENTS, replace(EVENTS[1], offset=7))  # event 2 adds 7


def repeated(**changed: Any) -> Seen:
    """What was left, with event 2 twice, once with something else; a transaction was released, so it may be twice."""
    return replace(SEEN, events=(*EVENTS, replace(EVENTS[1], offset=7, **changed)), released=1)


Check = Callable[[History, Seen], list[Any]]
CHECKS: dict[str, Check] = {
    "answers": lambda history, seen: answers.check(history, seen.source),
    "changes": lambda _, seen: changes.check(Domain(), seen),  # type: ignore[arg-type]
    "arrival": lambda _, seen: arrival.check(seen, may_repeat=False),
    "order": lambda _, seen: order.check(seen),
    "invariants": lambda _, seen: invariants.check(seen.source),
    "reads": lambda history, seen: reads.check(Domain(), history, seen),  # type: ignore[arg-type]
    "results": lambda _, seen: results.check(seen, may_reread=True),
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
    return sink(comparisons=[comparison({"a": Decimal(total)})], repeats=repeats, **changed)


def comparison(totals: Mapping[str, Decimal], **changed: Any) -> ComparedTotals:
    """The sink's totals, and perhaps other things that they are compared with."""
    return replace(ComparedTotals("totals", totals, DUE, ADDS, VERSIONS), **changed)


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
        "a repeat with other content": ("arrival", repeated(data={"order": 1, "pieces": 70})),
        "a repeat with another key": ("arrival", repeated(key="b")),
        "a repeat with another version": ("arrival", repeated(version=9)),
        "a repeat of another type": ("arrival", repeated(type="order.placed.v2")),
        "a repeat in another partition": ("arrival", repeated(partition=1)),
        "a repeat on another topic": ("arrival", repeated(topic="others")),
        "a gap": ("order", replace(SEEN, events=(EVENTS[0], EVENTS[2]))),
        "a wrong order": ("order", replace(SEEN, events=(EVENTS[1], EVENTS[0], EVENTS[2]))),
        "a version twice": ("order", replace(SEEN, events=(*EVENTS, event(4, 3, 9)))),
        "two partitions": ("order", replace(SEEN, events=(*EVENTS[:2], replace(EVENTS[2], partition=1)))),
        "an invariant": ("invariants", source(violations={"no money is lost": ["5 is lost"]})),
        "a total too low": ("results", having(6)),
        "a total too high": ("results", having(20)),
        "a key without a total": ("results", sink(comparisons=[comparison({})])),
        "a total of nobody": ("results", sink(comparisons=[comparison({**DUE, "b": Decimal(1)})])),
        "an event set aside": ("results", having(12, set_aside=frozenset({"event-3"}))),
        "a state that is wrong": ("results", sink(comparisons=[comparison({"a": Decimal(1)}, adds=None)])),
        "a naive sink that lost an event": (
            "results",
            having(12, "none", applied={"event-1": 1, "event-2": 1}),
        ),
        "a naive sink with too little drift": (
            "results",
            having(20, "none", applied={"event-1": 2, "event-2": 2, "event-3": 1}),
        ),
        "a naive sink that applied nothing": ("results", having(0, "none", applied={})),
        "a naive sink that applied one record of two": (
            "results",
            replace(having(13, "none", applied=dict.fromkeys(("event-1", "event-2", "event-3"), 1)), events=REPEATED),
        ),
        "an event lost behind another one of the same size": (
            "results",
            sink(comparisons=[comparison(DUE, versions={"a": 2})]),
        ),
        "a version that no event has": ("results", sink(comparisons=[comparison(DUE, versions={"a": 4})])),
        "a key without its version": ("results", sink(comparisons=[comparison(DUE, versions={})])),
        "an event that a strategy does not remember": ("results", sink(forgotten=frozenset({"event-2"}))),
        "an event that a table lacks, behind a right total": ("results", sink(rows={**ROWS, "event-2": 0})),
        "an event that a table has no row of": ("results", sink(rows={"event-1": 1, "event-3": 1})),
        "an event that a table has twice": ("results", sink(rows={**ROWS, "event-2": 2})),
        "an event that a table has, and no topic": ("results", sink(rows={**ROWS, "event-9": 1})),
        "an empty table": ("results", sink(rows={})),
        "an event that a naive sink applied, and no topic has": (
            "results",
            having(13, "none", applied={**ROWS, "event-9": 1}),
        ),
        "a change that the source has twice": ("changes", source(changed_twice=frozenset({"order 1"}))),
        "events that do not add up to the source, and nobody counts": (
            "results",
            sink(comparisons=[comparison(DUE, source={"a": Decimal(14)})], repeats="none"),
        ),
        "events that do not add up to the source": (
            "results",
            sink(comparisons=[comparison(DUE, source={"a": Decimal(14)})]),
        ),
    }.values(),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_wrong_is_found(checker: str, seen: Seen) -> None:
    assert cases(checker, seen=seen) > 0


def test_a_refusal_and_a_change_that_needs_no_event_are_sound() -> None:
    answers_of_all = [*SOURCE.answers, StoredAnswer("key-3", REFUSED, SOLD_OUT), stored(4)]
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
    assert cases("results", seen=wrong) == 2  # the event, and the source that has it
    assert cases("results", seen=replace(wrong, sinks=[*wrong.sinks, *SEEN.sinks])) == 2


def test_unapplied_event_is_found_even_if_the_total_is_right() -> None:
    assert cases("results", seen=having(13, "none", applied={"event-1": 1, "event-2": 1})) == 1


def test_an_event_that_no_comparison_counts_need_not_be_applied() -> None:
    totals = {"a": Decimal(12)}
    applied = {"event-1": 1, "event-2": 1}
    comparisons = [comparison(totals, source=totals)]
    seen = sink(comparisons=comparisons, repeats="none", applied=applied)
    other = replace(EVENTS[2], type="order.cancelled.v1")
    assert cases("results", seen=seen) > 0
    assert cases("results", seen=replace(seen, events=(*EVENTS[:2], other))) == 0


def test_a_table_has_every_event_once_however_often_the_topic_has_it() -> None:
    seen = replace(sink(rows=ROWS), events=REPEATED)
    assert cases("results", seen=seen) == 0
    [found] = results.check(replace(seen, sinks=[replace(seen.sinks[0], rows={**ROWS, "event-2": 2})]), may_reread=True)
    assert (found.promise, found.cases) == ("totals has every event once", 1)


def test_table_may_lack_set_aside_and_unrequested_events() -> None:
    rows = {"event-1": 1, "event-2": 1}
    other = replace(EVENTS[2], type="order.cancelled.v1")
    totals = {"a": Decimal(12)}
    unasked = replace(sink(rows=rows, comparisons=[comparison(totals, source=totals)]), events=(*EVENTS[:2], other))
    assert cases("results", seen=unasked) == 0
    aside = sink(rows=rows, set_aside=frozenset({"event-3"}))
    assert not [one for one in results.check(aside, may_reread=True) if one.promise == "totals has every event once"]


def test_an_answer_after_broken_ones_counts() -> None:
    history = History((attempt(1, BROKEN), attempt(1, None), attempt(1), attempt(2)))
    assert history.operations["key-1"].outcome == "ok"
    assert cases("answers", history) == 0
    assert cases("answers", history, source(answers=[stored(2)])) == 1


def test_a_repeat_is_allowed_where_the_relay_may_repeat() -> None:
    assert not arrival.check(replace(SEEN, events=REPEATED), may_repeat=True)
    assert judge(Domain(), RunRecord(seen=replace(SEEN, events=REPEATED))).repeats == 1  # type: ignore[arg-type]


def test_release_explains_one_block_of_repeats_per_partition() -> None:
    block = [replace(one, offset=one.offset + 10) for one in EVENTS]
    elsewhere = [replace(event(number, 1, 0, key="b"), partition=1) for number in (8, 9)]
    again = [replace(one, offset=5) for one in elsewhere]
    once = [*EVENTS, *block, *elsewhere, *again]
    twice = [*EVENTS, *block, event(4, 4, 20), replace(EVENTS[0], offset=30)]
    assert not arrival.check(replace(SEEN, events=once, released=1), may_repeat=False)
    [found] = arrival.check(replace(SEEN, events=twice, released=1), may_repeat=False)
    assert found.cases == 2
    assert not arrival.check(replace(SEEN, events=twice, released=2), may_repeat=False)


@pytest.mark.parametrize(
    "again",
    {
        "the last one once more": (*EVENTS, EVENTS[2]),
        "another order": (EVENTS[1], EVENTS[0], EVENTS[2]),
        "a gap": (EVENTS[0], EVENTS[2]),
    }.values(),
    ids=lambda again: "-".join(one.id for one in again),
)
def test_release_explains_only_its_records_in_order(again: tuple[TopicEvent, ...]) -> None:
    repeats = [replace(one, offset=10 + number) for number, one in enumerate(again)]
    assert arrival.check(replace(SEEN, events=[*EVENTS, *repeats], released=1), may_repeat=False)


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


KILLED = Injection(
    Planned(10.0, 10.0, "kafka-killed"),
    "process 7 was killed",
    is_healed=True,
    fired_s=10.0,
    healed_s=20.0,
    parts=("kafka",),
    foreign=(ForeignRecord("orders", 0, 7, "x", {"by region": ("Mars", 4)}),),
)
LOST = Checked("before sink-rewound", problems=[Problem("events-lost", "1 event lost")])


def test_a_fault_that_did_not_happen_or_was_not_healed_is_found() -> None:
    planned, happened = KILLED.planned, KILLED
    assert not faults.check([happened])
    missed = Injection(planned, problem="it did not run", is_healed=True)
    broken = replace(happened, is_healed=False)
    for one in (missed, broken):
        assert [found.examples for found in faults.check([one, happened])] == [[str(one)]]


def test_what_was_left_is_the_same_after_it_was_kept_in_files(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.write_seen(replace(WITH_FOREIGN, released=2))
    kept = folder.seen
    assert (kept.foreign, kept.foreign_keys) == (WITH_FOREIGN.foreign, {"x", "y", "Mars"})
    assert (kept.source, list(kept.events), kept.sinks, kept.released) == (
        SEEN.source,
        [*EVENTS],
        WITH_FOREIGN.sinks,
        2,
    )
    assert len((tmp_path / "events.jsonl").read_bytes().splitlines()) == len(EVENTS)


def test_the_record_of_a_run_is_the_same_after_it_was_kept_in_files(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.write("run.json", Plan(1, 60.0, 30.0, 5.0, exactly_once=False, faults=["kafka-killed"]))
    folder.write_seen(SEEN)
    folder.write("injections.json", [replace(KILLED, foreign=list(KILLED.foreign))])
    folder.write("deaths.json", [Death("sinks-0", 12.0, "killed")])
    drift = Problem("sink-drift", "drifts", "totals", 1, ["a"])
    folder.write("checks.json", [Checked("at the end", 1, [drift], "nothing")])
    folder.history_file.write_text("")
    found = folder.record
    assert found.injections == [replace(KILLED, foreign=list(KILLED.foreign))]
    assert found.deaths == [Death("sinks-0", 12.0, "killed")]
    assert found.checks == [Checked("at the end", 1, [drift], "nothing")]
    assert (found.selected, found.may_repeat) == (["kafka-killed"], True)


def set_up(history: History) -> History:
    """The same, as it was when only the set-up had sent."""
    return History(tuple(replace(one, client=SET_UP) for one in history.attempts))


@pytest.mark.parametrize(
    ("record", "result"),
    {
        "sound": (RunRecord(HISTORY, SEEN), "valid"),
        "wrong": (RunRecord(HISTORY, having(20)), "invalid"),
        "empty": (RunRecord(), "unknown"),
        "no sink": (RunRecord(HISTORY, replace(SEEN, sinks=())), "unknown"),
        "an invalid answer to a read": (
            RunRecord(History((*HISTORY.attempts, attempt(1, OK, "nothing", method="GET"))), SEEN),
            "unknown",
        ),
        "nothing succeeded": (RunRecord(History((attempt(3, REFUSED, SOLD_OUT), attempt(4, None)))), "unknown"),
        "only the set-up succeeded": (RunRecord(set_up(HISTORY), SEEN), "unknown"),
        "no read succeeded": (
            RunRecord(History(tuple(HISTORY.attempts[number] for number in (0, 2, 3, 4))), SEEN),
            "unknown",
        ),
        "no fault happened": (RunRecord(HISTORY, SEEN, selected=["kafka-killed", "prune"]), "unknown"),
        "one of two faults happened": (RunRecord(HISTORY, SEEN, [KILLED], selected=["kafka-killed", "prune"]), "valid"),
        "a loss was repaired": (RunRecord(HISTORY, SEEN, checks=[LOST]), "invalid"),
        "a process died": (RunRecord(HISTORY, SEEN, deaths=[Death("service", 9.0)]), "invalid"),
    }.values(),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_verdict(record: RunRecord, result: str) -> None:
    assert judge(Domain(), record).result == result  # type: ignore[arg-type]


def test_the_verdict_names_the_faults_that_did_not_happen() -> None:
    verdict = judge(Domain(), RunRecord(HISTORY, SEEN, [KILLED], selected=["kafka-killed", "prune"]))  # type: ignore[arg-type]
    assert (verdict.selected, verdict.not_happened) == (2, ["prune"])


def test_a_run_that_broke_off_is_judged_by_its_faults() -> None:
    assert broken_off(RunRecord(injections=[KILLED]), "Kafka is unavailable").result == "unknown"
    assert (
        broken_off(RunRecord(injections=[replace(KILLED, is_healed=False)]), "Kafka is unavailable").result == "invalid"
    )
    assert broken_off(RunRecord(checks=[LOST]), "Kafka is unavailable").result == "invalid"
    drift = Checked("before sink-rewound", problems=[Problem("sink-drift", "perhaps of a naive sink", "totals")])
    assert broken_off(RunRecord(checks=[drift]), "Kafka is unavailable").result == "unknown"


def test_a_fault_that_a_run_had_no_time_to_heal_is_no_broken_promise() -> None:
    stopped = replace(KILLED, is_healed=False, is_broken_off=True)
    assert broken_off(RunRecord(injections=[stopped]), "a client has ended").result == "unknown"


def test_a_checker_that_fails_is_named_and_hides_no_other() -> None:
    history = History((*HISTORY.attempts, attempt(1, OK, "nothing", method="GET")))
    verdict = judge(Domain(), RunRecord(history, having(20)))  # type: ignore[arg-type]
    assert (verdict.result, len(verdict.findings)) == ("invalid", 1)
    assert "reads" in verdict.why_unknown


def test_a_refusal_that_is_stored_otherwise_is_found() -> None:
    refusal = StoredAnswer("key-3", REFUSED, SOLD_OUT)
    other = replace(refusal, body={"title": "no such order"})
    assert cases("answers", seen=source(answers=[*SOURCE.answers, refusal])) == 0
    assert cases("answers", seen=source(answers=[*SOURCE.answers, other])) == 1


@pytest.mark.parametrize(
    ("status", "expected", "found"),
    [(OK, (OK,), 0), (OK, (), 0), (OK, (REFUSED,), 1), (REFUSED, (OK,), 1), (BROKEN, (OK,), 0), (None, (OK,), 0)],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_an_answer_that_the_domain_does_not_expect_is_found(
    status: int | None, expected: tuple[int, ...], found: int, method: str
) -> None:
    one = replace(attempt(9, status, {"id": 9}, method), key=None, expected=expected)
    assert cases("answers", History((*HISTORY.attempts, one))) == found


@pytest.mark.parametrize(("count", "found"), [(answers.LAST, 1), (answers.LAST - 1, 0)])
@pytest.mark.parametrize("status", [None, BROKEN])
def test_a_service_that_answers_no_more_is_found(count: int, found: int, status: int | None) -> None:
    silent = [attempt(number, status) for number in range(100, 100 + count)]
    assert cases("answers", History((*HISTORY.attempts[:3], *silent))) == found
    assert cases("answers", History((*silent, *HISTORY.attempts[:3]))) == 0


def test_a_change_with_an_unknown_outcome_hides_no_later_one() -> None:
    history = History((attempt(8, BROKEN), attempt(9)))
    assert cases("answers", history, source(answers=[])) == 1


@pytest.mark.parametrize("others", [REFUSED, BROKEN])
def test_reads_do_not_hide_that_no_change_is_made(others: int) -> None:
    reads = [attempt(number, method="GET") for number in range(200, 220)]
    silent = [attempt(number, BROKEN if number % 2 else others) for number in range(100, 100 + answers.LAST)]
    assert cases("answers", History((*HISTORY.attempts[:3], *silent, *reads))) == 1
    assert cases("answers", History((*HISTORY.attempts[:3], *silent, *reads, HISTORY.attempts[0]))) == 0


def test_reused_key_may_get_a_status_that_was_not_expected() -> None:
    misuse = replace(attempt(1, REFUSED, SOLD_OUT), body={"pieces": 9}, expected=(OK,))
    assert cases("answers", History((*HISTORY.attempts, misuse))) == 0


@pytest.mark.parametrize(("status", "found"), [(REFUSED, 0), (BROKEN, 0), (OK, 1)])
def test_a_used_key_must_be_refused_to_another_request(status: int, found: int) -> None:
    misuse = replace(attempt(1, status, {"id": 1}), body={"pieces": 9})
    history = History((*HISTORY.attempts, misuse))
    assert cases("answers", history) == found
    assert history.operations == HISTORY.operations
    assert history.misuses == [misuse]


def test_a_read_that_the_service_refuses_is_judged() -> None:
    missing = attempt(1, 404, {"title": "no such order"}, method="GET")
    assert cases("reads", History((*HISTORY.attempts, missing))) == 1
    assert cases("reads", History((*HISTORY.attempts, replace(missing, status=BROKEN)))) == 0


def test_counting_sink_without_rereads_applies_each_record_once() -> None:
    seen = having(20, "none", applied={"event-1": 1, "event-2": 2, "event-3": 1})
    assert not results.check(seen, may_reread=True)
    [found] = results.check(seen, may_reread=False)
    assert found.cases == 1
    assert not results.check(replace(seen, events=REPEATED), may_reread=False)


def test_naive_sink_without_rereads_has_each_record_once() -> None:
    for events, total in ((EVENTS, 13), (REPEATED, 20)):
        assert not results.check(replace(having(total, "none"), events=events), may_reread=False)
        assert results.check(replace(having(total + 1, "none"), events=events), may_reread=False)
        assert not results.check(replace(having(total + 1, "none"), events=events), may_reread=True)


def test_later_version_of_an_uncompared_event_is_valid() -> None:
    other = replace(event(4, 4, 9), type="order.cancelled.v1")
    seen = replace(sink(comparisons=[comparison(DUE, versions={"a": 4})]), events=(*EVENTS, other))
    assert cases("results", seen=seen) == 0


@pytest.mark.parametrize(
    ("kept", "lacking"),
    [
        (Kept(), {"event-2", "event-3"}),
        (Kept(horizon="event-3"), {"event-3"}),
        (Kept(bases={"orders": {"a": 2}}), {"event-3"}),
        (Kept(bases={"orders": {"b": 9}, "others": {"a": 9}}), {"event-2", "event-3"}),
    ],
    ids=["all", "below the horizon", "taken from the source", "of other keys"],
)
def test_what_a_strategy_forgot(kept: Kept, lacking: set[str]) -> None:
    assert forgotten(EVENTS, {"order.placed.v1"}, {"event-1"}, kept) == lacking
    assert not forgotten(EVENTS, {"order.cancelled.v1"}, set(), kept)
    assert not forgotten(EVENTS, {"order.placed.v1"}, {one.id for one in EVENTS}, kept)


@pytest.mark.parametrize(
    ("process", "at_s", "parts", "found"),
    [
        ("sinks-1", 15.0, ("sinks",), 0),
        ("sinks-1", 15.0, ("sinks-postgres",), 0),
        ("sinks-1", 21.0, ("postgres",), 0),
        ("sinks-1", 9.0, ("sinks",), 1),
        ("sinks-1", 20.0 + deaths.GRACE_S + 1, ("sinks",), 1),
        ("sinks-1", 15.0, ("service", "connect"), 1),
        ("service", 15.0, ("service", "postgres"), 0),
        ("service", 15.0, ("postgres",), 1),
        ("kafka", 15.0, ("kafka",), 0),
        ("kafka", 15.0, ("connect-kafka",), 1),
        ("postgres", 15.0, ("sinks",), 1),
        ("connector", 15.0, ("debezium-postgres",), 0),
        ("connector", 15.0, ("connector",), 0),
        ("connect", 15.0, ("connector",), 1),
        ("connector", 15.0, ("sinks",), 1),
    ],
)
def test_a_death_needs_a_fault_of_what_the_process_needs(
    process: str, at_s: float, parts: tuple[str, ...], found: int
) -> None:
    fault = replace(KILLED, parts=parts)
    assert len(deaths.check([Death(process, at_s)], [fault])) == found
    assert len(deaths.check([Death(process, at_s)], [replace(fault, parts=(), held=parts)])) == 1
    assert len(deaths.check([Death(process, at_s)], [])) == 1
    assert len(deaths.check([Death(process, at_s, alive_s=at_s)], [fault])) == found
    assert not deaths.check([], [fault])


def test_a_fault_of_one_process_explains_the_end_of_no_other() -> None:
    fault = replace(KILLED, parts=("sinks",), victims=("sinks-1",))
    assert not deaths.check([Death("sinks-1", 12.0)], [fault])
    assert deaths.check([Death("sinks-0", 12.0)], [fault])
    assert not deaths.check([Death("sinks-0", 12.0)], [replace(fault, parts=("sinks", "kafka"))]), "it needs the broker"


@pytest.mark.parametrize(("alive_s", "found"), [(12.0, 0), (79.0, 0), (81.0, 1), (199.0, 1)])
def test_late_death_is_explained_by_faults_since_last_seen_alive(alive_s: float, found: int) -> None:
    fault, seen_late = replace(KILLED, parts=("connector",)), Death("connector", 200.0, alive_s=alive_s)
    assert len(deaths.check([seen_late], [fault])) == found


def test_on_a_slow_machine_a_process_may_end_later_after_a_fault() -> None:
    late = Death("sinks-1", 20.0 + 2 * deaths.GRACE_S)
    assert deaths.check([late], [KILLED])
    assert not deaths.check([late], [KILLED], timeout_scale=2.0)


@pytest.mark.parametrize(
    ("code", "repeats", "duplicates", "found"),
    [
        ("events-lost", "all", 0, 1),
        ("versions-repeated", "all", 0, 1),
        ("versions-missing", "all", 3, 1),
        ("malformed-records", "all", 0, 0),
        ("sink-parked", "all", 0, 0),
        ("sink-drift", "all", 3, 1),
        ("sink-drift", "re-reads", 3, 0),
        ("sink-drift", "re-reads", 0, 1),
        ("sink-drift", "none", 0, 0),
    ],
)
def test_a_loss_is_found_before_a_rebuild_repairs_it(code: str, repeats: Any, duplicates: int, found: int) -> None:
    one = Checked("before sink-rewound", duplicates, [Problem(code, "something is wrong", "totals")])
    assert len(checks.check([one, Checked("at the end")], [Sink("totals", repeats)])) == found


def test_sinks_that_do_not_catch_up_are_found() -> None:
    assert not checks.check([Checked("at the end")], SEEN.sinks)
    assert checks.check([Checked("at the end", in_flight="sink totals is 3 events behind")], SEEN.sinks)


@pytest.mark.parametrize(("malformed", "found"), [(0, 0), (3, 0), (4, 1)])
def test_invalid_records_that_no_fault_has_sent_are_found(malformed: int, found: int) -> None:
    sent = [replace(KILLED, invalid=2)]  # and a foreign event
    verdict = judge(Domain(), RunRecord(HISTORY, SEEN, sent, checks=[Checked("at the end", malformed=malformed)]))  # type: ignore[arg-type]
    assert len(verdict.findings) == found


def test_a_check_is_read_from_its_report() -> None:
    drift = {"code": "sink-drift", "message": "it drifts", "sink": "totals", "comparison": "pieces", "count": 2}
    report = {
        "total": {"duplicates": 2},
        "topics": [{"malformed": {"count": 1, "acknowledged": 2}}, {"malformed": {"count": 1, "acknowledged": 0}}],
        "findings": [drift],
        "sinks": [
            {"name": "totals", "comparisons": [{"name": "pieces", "drift": {"b": 1, "a": 2}}]},
            {"name": "others", "comparisons": [{"name": "pieces", "drift": {"c": 2}}]},
        ],
    }
    problem = Problem("sink-drift", "it drifts", "totals", 2, ["a", "b"])
    assert of_report("now", report) == Checked("now", 2, [problem], malformed=4)


@pytest.mark.parametrize(
    ("problem", "found"),
    [
        (Problem("foreign-events", "2 events", count=2), 0),
        (Problem("foreign-events", "3 events", count=3), 1),
        (Problem("sink-drift", "it drifts", "totals", 2, ["x", "Mars"]), 0),
        (Problem("sink-drift", "it drifts", "totals", 2, ["a", "x"]), 1),
        (Problem("sink-drift", "nobody knows where", "totals", 2), 1),
        (Problem("events-lost", "lost", count=1), 1),
    ],
)
def test_a_check_may_find_foreign_events_that_were_sent_and_no_others(problem: Problem, found: int) -> None:
    assert len(checks.check([Checked("now", 0, [problem])], SEEN.sinks, 2, {"x", "y", "Mars"})) == found


TYPE = "order.placed.v1"


def stranger(key: str, event_id: str, offset: int, pieces: int) -> Foreign:
    """A foreign event."""
    numbers = {"pieces": Decimal(pieces)}
    event = TopicEvent(event_id, "orders", 0, offset, key, TYPE, 1, {"order": 99, "pieces": pieces}, numbers)
    return Foreign(event, {"by region": ("Mars", pieces)})


def region(total: int) -> ComparedTotals:
    """A comparison that does not say what an event adds."""
    return ComparedTotals("by region", {"Mars": Decimal(total)}, {}, None)


# One with an id of its own, and one with the id of event 2.
FOREIGN = [stranger("x", "event-8", 8, 4), stranger("y", "event-2", 9, 6)]
TYPES = frozenset({TYPE})


def foreign_of(x: int, y: int, *more: ComparedTotals, total: int = 13, **changed: Any) -> Seen:
    """What was left, with two foreign events and these totals of their keys."""
    totals = {"a": Decimal(total), "x": Decimal(x), "y": Decimal(y)}
    given = {"types": TYPES, **changed}
    return replace(sink(comparisons=[comparison(totals), *more], **given), foreign=FOREIGN)


WITH_FOREIGN = foreign_of(4, 0, region(4))
ASIDE = {"orders-0@8": OLDER_THAN_HORIZON}
TWICE = {"event-1": 1, "event-2": 2, "event-3": 1, "event-8": 1}


FOREIGN_CASES = {
    "by ids": (WITH_FOREIGN, 0),
    "one was ignored": (foreign_of(0, 0), 1),
    "one was applied twice": (foreign_of(8, 0), 1),
    "a used id was applied": (foreign_of(4, 6), 1),
    "another total says twice": (foreign_of(4, 0, region(8)), 1),
    "another total lacks it": (foreign_of(4, 0, region(0)), 1),
    "by versions": (foreign_of(4, 6, region(10), knows_ids=False), 0),
    "by versions, and one was ignored": (foreign_of(4, 0, knows_ids=False), 1),
    "of other types": (foreign_of(0, 0, types=frozenset()), 0),
    "of other types, and one was applied": (foreign_of(4, 0, types=frozenset()), 1),
    "of other types, and one was applied to another total": (foreign_of(0, 0, region(4), types=frozenset()), 1),
    "a total that it adds nothing to": (foreign_of(4, 0, ComparedTotals("others", {"x": Decimal(1)}, {}, {})), 1),
    "a total of which nobody knows what it adds": (
        foreign_of(4, 0, ComparedTotals("others", {"x": Decimal(1)}, {}, None)),
        0,
    ),
    "the id of an event of another type": (
        replace(foreign_of(4, 6), events=[replace(one, type="order.cancelled.v1") for one in EVENTS]),
        0,
    ),
    "rebuilt from the source": (foreign_of(0, 0, is_based=True), 0),
    "rebuilt from the source, and twice since": (foreign_of(8, 0, is_based=True), 1),
    "too old": (foreign_of(0, 0, foreign_set_aside=ASIDE), 0),
    "too old, and applied": (foreign_of(4, 0, foreign_set_aside=ASIDE), 1),
    "too old by versions": (foreign_of(0, 6, foreign_set_aside=ASIDE, knows_ids=False), 1),
    "set aside": (foreign_of(0, 0, foreign_set_aside={"orders-0@8": "sold out"}), 1),
    "by offsets": (foreign_of(4, 6, repeats="re-reads", knows_ids=False), 0),
    "by nothing": (foreign_of(8, 6, repeats="none", knows_ids=False), 0),
    "by nothing, and one was ignored": (foreign_of(0, 6, repeats="none", knows_ids=False), 1),
    "counted": (foreign_of(4, 6, repeats="none", knows_ids=False, applied=TWICE), 0),
    "counted otherwise": (foreign_of(8, 6, repeats="none", knows_ids=False, applied=TWICE), 1),
    "unreadable": (replace(WITH_FOREIGN, unreadable=["orders-0@7"]), 1),
}


@pytest.mark.parametrize(("seen", "found"), FOREIGN_CASES.values(), ids=FOREIGN_CASES)
def test_a_foreign_event_is_applied_as_the_strategy_promises(seen: Seen, found: int) -> None:
    assert sum(one.cases for one in foreign.check(seen, may_reread=True)) == found


def test_a_sink_that_read_nothing_again_applies_a_foreign_event_once() -> None:
    assert foreign.check(foreign_of(8, 6, repeats="none", knows_ids=False), may_reread=False)


def test_foreign_events_change_no_judgement_on_others() -> None:
    counted = foreign_of(4, 6, repeats="none", knows_ids=False, applied=TWICE)
    for checker in CHECKS:
        assert cases(checker, seen=WITH_FOREIGN) == cases(checker, seen=counted) == 0
    assert not results.check(counted, may_reread=False), "the second application was that of the foreign event"
    assert cases("results", seen=foreign_of(4, 0, total=12)) > 0
    drifting = foreign_of(4, 6, total=20, repeats="none", knows_ids=False, applied=TWICE)
    assert cases("results", seen=drifting) > 0, "and so nothing of it drifts"
