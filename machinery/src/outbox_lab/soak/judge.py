"""The verdict on a run: every promise in words, with the checker that returns its violations, and what they find."""

from __future__ import annotations

import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import partial
from http import HTTPStatus
from itertools import chain
from typing import Literal, NamedTuple

from outbox_lab.soak.domain import options_of
from outbox_lab.soak.history import (
    SET_UP,
    WRONG_RESULT,
    Checked,
    ComparedTotals,
    Death,
    Injection,
    Problem,
    Seen,
    Sink,
    TopicEvent,
)
from outbox_lab.soak.record import RunRecord

ZERO = Decimal(0)
Totals = Mapping[str, Decimal]
Cases = Iterable[str]  # what violates a promise
Checker = Callable[[RunRecord], Cases]

# The run: faults, ends of processes, and `outbox check` -----------------------------------------------------------

GRACE_S = 60.0  # after a fault: a process may notice late, and needs time to end
# By part: those whose faults may end it. A process of sinks ends when Spark's batch fails.
EXCUSES = {
    "postgres": {"postgres"},
    "kafka": {"kafka"},
    "connect": {"connect", "kafka", "connect-kafka"},
    "connector": {"connector", "connect", "kafka", "postgres", "connect-kafka", "debezium-postgres"},
    "service": {"service", "service-postgres"},
    "sinks": {"sinks", "kafka", "postgres", "sinks-kafka", "sinks-postgres"},
}
# What no fault may bring about. The other checkers judge the rest, once everything has settled.
LOSSES = {"events-lost", "versions-missing", "versions-repeated", "keys-spread", "foreign-events"}


def unexplained_deaths(run: RunRecord) -> Iterator[str]:
    """Without this checker, a part that restarts processes, such as the keeper, would hide a crash."""
    for one in run.deaths:
        if not any(_explains(fault, one, GRACE_S * run.plan.timeout_scale) for fault in run.injections):
            yield f"{one.process} at {one.at_s:.0f} s: {one.last_line}"


def _explains(fault: Injection, death: Death, grace_s: float) -> bool:
    """Whether a fault of what it needs lasts, or has just ended, at some time at which the process may have ended."""
    alive_s = death.at_s if death.alive_s is None else death.alive_s
    is_then = fault.fired_s <= death.at_s and alive_s <= fault.healed_s + grace_s
    broken = set(fault.parts)
    if fault.victims and death.process not in fault.victims:
        broken.discard(death.part)  # it was a fault of another process
    return is_then and not EXCUSES[death.part].isdisjoint(broken)


def losses(run: RunRecord) -> Iterator[str]:
    """Losses that `outbox check` has found. An invalid record is no loss."""
    for one in run.checks:
        for problem in one.problems:
            if _is_loss(problem, one, run):
                yield f"{one.when}: {problem.message}"


def _is_loss(problem: Problem, of: Checked, run: RunRecord) -> bool:
    """A naive sink may drift. One that recognises re-reads alone may drift once an event is on its topic twice."""
    if problem.code not in WRONG_RESULT:
        return problem.code in LOSSES
    if not run.seen.sinks:
        return False  # nobody knows which repeats they recognise
    repeats = {sink.name: sink.repeats for sink in run.seen.sinks}.get(problem.sink or "")
    return repeats != "none" and not (repeats == "re-reads" and of.duplicates)


def unsent_invalid_records(run: RunRecord) -> Iterator[str]:
    sent = sum(one.invalid for one in run.injections)
    for one in run.checks:
        if one.malformed > sent:
            yield f"{one.when}: {one.malformed} records break the contract, and faults have sent {sent}"


# The service: answers to clients, and what the source has of them --------------------------------------------------

LAST = 20  # changes; clients that send at the same time are fewer


def unexpected_statuses(run: RunRecord) -> Iterator[str]:
    misuses = {id(one) for one in run.history.misuses}  # which the domain has not planned
    for one in run.history.attempts:
        if id(one) not in misuses and one.expected and one.outcome != "unknown" and one.status not in one.expected:
            yield f"{one.kind}: {one.method} {one.path} at {one.sent_s:.0f} s was answered {one.status}"


def silence(run: RunRecord) -> Iterator[str]:
    """Unknown outcomes are right while a fault lasts, and clients go on after the last one until changes are made.

    Reads and invalid requests say nothing: they are answered although no change can be written any more.
    """
    last = [one.outcome for one in run.history.attempts if one.key is not None][-LAST:]
    if len(last) == LAST and "unknown" in last and "ok" not in last:
        yield f"none of the last {LAST} changes was acknowledged"


def untrue_answers(run: RunRecord) -> Iterator[str]:
    """An acknowledged change is there. A refused one is not, and the refusal is the stored one if it is stored.

    A change with an unknown outcome is there or not: it only has to be whole.
    """
    stored = {answer.key: answer for answer in run.seen.source.answers}
    for operation in run.history.operations.values():
        answer = stored.get(operation.key)
        if operation.outcome == "unknown":
            continue
        if answer is None:
            if operation.outcome == "ok":
                yield f"{operation.key}: acknowledged, and not there"
        elif operation.outcome == "failed" and answer.status < HTTPStatus.BAD_REQUEST:
            yield f"{operation.key}: failed with {operation.answers[0][0]}, and is there"
        elif (answer.status, answer.body) not in operation.answers:
            yield f"{operation.key}: answered {operation.answers[0]}, and stored as {answer.status, answer.body}"


def untrue_reads(run: RunRecord) -> Cases:
    """The domain compares each read with the events, and with the changes acknowledged before it."""
    contradictions = options_of(run.domain).contradictions
    return contradictions(run.history, run.seen.firsts) if contradictions else ()


# The source: changes and their events ------------------------------------------------------------------------------


def _promised(run: RunRecord) -> Counter[str]:
    """By change, how many keys have a successful answer about it."""
    successes = (answer for answer in run.seen.source.answers if answer.status < HTTPStatus.BAD_REQUEST)
    return Counter(run.domain.change_of_answer(answer.body) for answer in successes)


def wrong_numbers_of_events(run: RunRecord) -> Iterator[str]:
    made, events = run.seen.source.changes, Counter(map(run.domain.change_of_event, run.seen.firsts.values()))
    for change in made.keys() | events.keys():
        if events.get(change, 0) != made.get(change, 0):
            yield f"{change}: {events.get(change, 0)} of {made.get(change, 0)} events"


# The topics of events ----------------------------------------------------------------------------------------------


def differing_repeats(run: RunRecord) -> Iterator[str]:
    """The repeats that differ from the first in more than the offset."""
    for event in run.seen.events:
        before = run.seen.firsts[event.id]
        if replace(event, offset=before.offset) != before:
            yield f"{event.id}: {before.place} and {event.place} differ"


def unexplained_repeats(run: RunRecord) -> Iterator[str]:
    """With exactly-once a repeat has one reason: `outbox connect apply` has ended a hanging transaction.

    The task sends the events of that transaction again, all of them and before any other. So each transaction has at
    most one block of repeats in a partition. Found are the beginnings of the blocks of a partition with more of them.
    """
    for (topic, _), begun in _blocks(run.seen).items() if run.plan.exactly_once else ():
        if len(begun) > run.seen.released.get(topic, 0):
            yield from (f"{event.id} at {event.place}" for event in begun)


def _blocks(seen: Seen) -> Mapping[tuple[str, int], list[TopicEvent]]:
    """By partition, the first record of each block.

    A block is a run of repeats with no other record between them. Their first records stand in the same order, with no
    other first record between them.
    """
    found: dict[tuple[str, int], list[TopicEvent]] = {}
    numbers: dict[str, int] = {}  # by event, the number of its first record among those of its partition
    counts: Counter[tuple[str, int]] = Counter()  # by partition, of these
    next_ones: dict[tuple[str, int], int] = {}  # by partition with an open block, the number that it goes on with
    for event in seen.events:
        partition = event.topic, event.partition
        if event is seen.firsts[event.id]:
            numbers[event.id] = counts[partition]
            counts[partition] += 1
            next_ones.pop(partition, None)
            continue
        number = numbers[event.id]
        if next_ones.get(partition) != number:
            found.setdefault(partition, []).append(event)
        next_ones[partition] = number + 1
    return found


def version_gaps(run: RunRecord) -> Iterator[str]:
    """The first version of each key that does not go on by one."""
    for events in _by_key(run):
        for expected, event in enumerate(events, start=1):
            if event.version != expected:
                yield f"{event.key}: {event.version} instead of {expected} at {event.place}"
                break


def _by_key(run: RunRecord) -> Iterable[Sequence[TopicEvent]]:
    """The numbered events of each key, each once, in the order of the topic."""
    found: dict[tuple[str, str], list[TopicEvent]] = defaultdict(list)
    for event in run.seen.firsts.values():
        if event.version is not None:
            found[event.topic, event.key].append(event)
    return found.values()


# Sinks: each has what its strategy promises, and no more than the repeats that it does not recognise ---------------

# Totals alone would hide a lost event behind another one of the same size. So the highest version of each key, and the
# events that a strategy remembers or counts, are compared too.


def miscounted_events(run: RunRecord, sink: Sink) -> Iterator[str]:
    """The events that a counting sink has not applied once for each record, and those that are on no topic.

    More often is right if it may re-read.
    """
    if sink.applied is None:
        return
    records = Counter(event.id for event in run.seen.events)
    for event_id, event in run.seen.firsts.items():
        is_due = _is_due(sink, event)
        times, due = sink.applied.get(event_id, 0), records[event_id] if is_due else 0
        if times < due or (is_due and times > due and not run.may_reread):
            yield f"{event_id} at {event.place}: applied {times} times, and {due} times on the topic"
    for event_id in sink.applied.keys() - run.seen.firsts.keys():
        yield f"{event_id}: applied {sink.applied[event_id]} times, and on no topic"


def events_not_once(run: RunRecord, sink: Sink) -> Iterator[str]:
    """The events that a sink with a row or an effect for each does not have once; and those of no topic."""
    rows = sink.rows if sink.effects is None else Counter(chain.from_iterable(sink.effects.values()))
    if rows is None:
        return
    due = {event.id: event for event in run.seen.firsts.values() if _is_due(sink, event)}
    for event_id, event in due.items():
        times = rows.get(event_id, 0)
        if times != 1:
            yield f"{event_id} at {event.place}: there {times} times"
    for event_id in rows.keys() - due.keys() - sink.set_aside:
        yield f"{event_id}: there {rows[event_id]} times, and on no topic"


def disordered_effects(run: RunRecord, sink: Sink) -> Iterator[str]:
    """The first effect of each key that is of another key, or stands behind one of a later event."""
    for key, ids in (sink.effects or {}).items():
        before: TopicEvent | None = None
        for event in (run.seen.firsts[event_id] for event_id in ids if event_id in run.seen.firsts):
            if event.key != key or (before is not None and event.rank < before.rank):
                yield f"{key}: {event.id} at {event.place}, behind {before.id if before else 'nothing'}"
                break
            before = event


def _is_due(sink: Sink, event: TopicEvent) -> bool:
    """Whether the sink has to have an event: it is to have an effect, or a comparison is about it; and the sink has not
    set it aside.
    """
    is_asked = event.type in sink.types or any(one.added_by(event) is not None for one in sink.comparisons)
    return is_asked and event.id not in sink.set_aside


def wrong_totals(run: RunRecord, sink: Sink, one: ComparedTotals) -> Iterator[str]:
    """The totals that are not those of the source, or not those with the repeats that the strategy does not recognise.

    And the keys whose highest applied version is not that of their last event.
    """
    counted = [*_counted(run.seen, sink, one)]
    due = one.source if one.adds is None else _sums((event.key, number) for event, number in counted)
    for key, difference in _difference(due, one.source).items():
        yield f"{key}: the events on the topics add up to {difference} more than the source has"
    if one.versions is not None and one.adds is not None:
        latest = _highest(run.seen.firsts.values())
        for place, version in _highest(event for event, _ in counted).items():
            applied = one.versions.get(place[1])
            # The sink may have applied later events of the key that the comparison is not about.
            if applied is None or not version <= applied <= latest[place]:
                yield f"{place[1]}: version {applied} is applied, and {version} is the last"
    promised = _repeated(run, sink, one)
    if promised is None:
        return
    found = _difference(one.totals, due)
    for key in found.keys() | promised.keys():
        if found.get(key, ZERO) != promised.get(key, ZERO):
            yield f"{key}: off by {found.get(key, ZERO)}, and {promised.get(key, ZERO)} was repeated"


def _counted(seen: Seen, sink: Sink, one: ComparedTotals) -> Iterator[tuple[TopicEvent, Decimal]]:
    """The events that a comparison is about and that the sink has not set aside, with what they add."""
    for event in seen.firsts.values():
        number = one.added_by(event)
        if number is not None and event.id not in sink.set_aside:
            yield event, number


def _sums(numbers: Iterable[tuple[str, Decimal]]) -> Totals:
    found: dict[str, Decimal] = defaultdict(Decimal)
    for key, number in numbers:
        found[key] += number
    return found


def _difference(left: Totals, right: Totals) -> dict[str, Decimal]:
    """By key, what the left has more than the right; only keys that differ."""
    differences = {key: left.get(key, ZERO) - right.get(key, ZERO) for key in left.keys() | right.keys()}
    return {key: difference for key, difference in differences.items() if difference}


def _highest(events: Iterable[TopicEvent]) -> dict[tuple[str, str], int]:
    """By topic and key, the highest version."""
    found: dict[tuple[str, str], int] = {}
    for event in events:
        if event.version is not None:
            place = event.topic, event.key
            found[place] = max(event.version, found.get(place, event.version))
    return found


def _repeated(run: RunRecord, sink: Sink, one: ComparedTotals) -> Totals | None:
    """By key, what the repeats have added that the strategy does not recognise; None if nobody knows."""
    if sink.repeats == "all" or one.adds is None:
        return {}
    applied = sink.applied if sink.repeats == "none" else None
    if applied is None and sink.repeats == "none" and run.may_reread:
        return None
    # A sink that does not count has read each record once.
    times: Mapping[str, int] = Counter(event.id for event in run.seen.events) if applied is None else applied
    return _sums(
        (event.key, (max(times.get(event.id, 1), 1) - 1) * number) for event, number in _counted(run.seen, sink, one)
    )


# The promises ------------------------------------------------------------------------------------------------------

# Judged in every run, even if nobody could read what it has left.
OF_RUN: Mapping[str, Checker] = {
    "a fault that began has happened": lambda run: (str(one) for one in run.injections if not one.evidence),
    "a fault is healed": lambda run: (
        str(one) for one in run.injections if one.evidence and not (one.is_healed or one.is_broken_off)
    ),
    "a process ends only by a fault": unexplained_deaths,
    "the check finds no loss": losses,
    "an invalid record is one of a fault": unsent_invalid_records,
    "the sinks catch up": lambda run: (one.in_flight for one in run.checks if one.in_flight),
}
OF_CHAIN: Mapping[str, Checker] = {
    "a key is answered once": lambda run: (
        f"{one.key}: {', '.join(map(str, one.answers))}"
        for one in run.history.operations.values()
        if len(one.answers) > 1
    ),
    "a request has a status that the domain expects": unexpected_statuses,
    "the service makes changes after the last fault": silence,
    "a used key is refused to another request": lambda run: (
        f"{one.key}: {one.method} {one.path} with another body was answered {one.status}"
        for one in run.history.misuses
        if one.outcome == "ok"
    ),
    "a key is stored once": lambda run: (
        key for key, count in Counter(answer.key for answer in run.seen.source.answers).items() if count > 1
    ),
    "a stored key was sent by a client": lambda run: (
        {answer.key for answer in run.seen.source.answers} - run.history.operations.keys()
    ),
    "an acknowledged change is there, a failed one is not": untrue_answers,
    "a read returns the truth": untrue_reads,
    "a change is made for one key": lambda run: (change for change, keys in _promised(run).items() if keys > 1),
    "the source has a change once": lambda run: run.seen.source.changed_twice,
    "a change is whole: its answer and its rows": lambda run: _promised(run).keys() ^ run.seen.source.changes.keys(),
    "a change has its events, and an event its change": wrong_numbers_of_events,
    # Of those that `outbox prune` has deleted: "a change has its events".
    "an event of the outbox is on its topic": lambda run: run.seen.source.outbox - run.seen.firsts.keys(),
    "a repeated event is the same event": differing_repeats,
    "with exactly-once an event is on its topic once": unexplained_repeats,
    "the events of a key are on one partition": lambda run: (
        events[0].key for events in _by_key(run) if len({event.partition for event in events}) > 1
    ),
    "the versions of a key are 1, 2, 3 and so on, in this order": version_gaps,
}
OF_SINK: Mapping[str, Callable[[RunRecord, Sink], Cases]] = {
    "sets no valid event aside": lambda _, sink: sink.set_aside,
    "remembers every event": lambda _, sink: sink.forgotten - sink.set_aside,
    "applies every record": miscounted_events,
    "has every event once": events_not_once,
    "has the events of a key in their order": disordered_effects,
}


def promises(run: RunRecord) -> Iterator[tuple[str, Callable[[], Cases]]]:
    """Each promise about what the run has left, with its checker. The domain's invariants are among them."""
    for text, check in OF_CHAIN.items():
        yield text, partial(check, run)
    for invariant, rows in run.seen.source.violations.items():
        yield invariant, partial(tuple, rows)
    for sink in run.seen.sinks:
        for text, check_sink in OF_SINK.items():
            yield f"{sink.name} {text}", partial(check_sink, run, sink)
        for one in sink.comparisons:
            text = f"{sink.name} has the {one.name} that its strategy promises"
            yield text, partial(wrong_totals, run, sink, one)


class Finding(NamedTuple):
    """A promise that does not hold, how often, and the first cases."""

    promise: str
    cases: int
    examples: Sequence[str]

    def __str__(self) -> str:
        more = f" and {self.cases - len(self.examples)} more" if self.cases > len(self.examples) else ""
        return f"{self.promise}: {'; '.join(self.examples)}{more}"


@dataclass(frozen=True)
class Verdict:
    """``valid``: every promise held, and every fault that began has happened. ``unknown``: the run cannot be judged."""

    result: Literal["valid", "invalid", "unknown"]
    findings: Sequence[Finding] = ()
    operations: int = 0
    unknown_operations: int = 0
    events: int = 0
    repeats: int = 0  # records on the topics that repeat an event
    faults: int = 0
    selected: int = 0  # how many kinds of faults were asked for
    not_happened: Sequence[str] = ()  # those of them that the run had no time for
    why_unknown: str = ""


def judge(run: RunRecord, broken_off: str = "") -> Verdict:
    """Let every checker look. Of a run that broke off for a reason, only at faults, deaths and checks."""
    of_run = [(text, partial(check, run)) for text, check in OF_RUN.items()]
    found, failed = _findings(of_run if broken_off else [*of_run, *promises(run)])
    seen = run.seen
    outcomes = Counter(operation.outcome for operation in run.history.operations.values())
    why_unknown = broken_off or failed or ("" if found else _lacking(run))
    return Verdict(
        "invalid" if found else "unknown" if why_unknown else "valid",
        found,
        operations=outcomes.total(),
        unknown_operations=outcomes["unknown"],
        events=len(seen.firsts),
        repeats=len(seen.events) - len(seen.firsts),
        faults=len(run.injections),
        selected=len(run.plan.faults),
        not_happened=run.not_happened,
        why_unknown=why_unknown,
    )


def _findings(judged: Iterable[tuple[str, Callable[[], Cases]]]) -> tuple[list[Finding], str]:
    """The findings, and the checkers that have failed: the domain may not know what a service has answered."""
    found: list[Finding] = []
    failed: list[str] = []
    for promise, check in judged:
        try:
            cases = sorted(check())
        except Exception as error:
            *_, frame = traceback.extract_tb(error.__traceback__)
            where = f"{frame.filename}:{frame.lineno}"
            failed.append(f'the checker of "{promise}" failed: {type(error).__name__}: {error} at {where}')
        else:
            if cases:
                found.append(Finding(promise, len(cases), cases[:5]))
    return found, "; ".join(failed)


def _lacking(run: RunRecord) -> str:
    """The reason why a run without findings is not valid, if any. The operations that set it up do not count."""
    if not run.seen.sinks:
        return "no sink was looked at"
    sent = [operation for operation in run.history.operations.values() if operation.attempts[0].client != SET_UP]
    if not any(operation.outcome == "ok" for operation in sent):
        return "no operation succeeded"
    if options_of(run.domain).contradictions and not any(read.outcome == "ok" for read in run.history.reads):
        return "no read succeeded"
    if run.plan.faults and len(run.not_happened) == len(run.plan.faults):
        return "no fault happened"
    return ""
