"""The checkers of the run, of the source and of the topics: a function for each promise, which returns its violations.

`outbox_lab.soak.verdict` has the promises in words, and `outbox_lab.soak.sink_checkers` the checkers of sinks.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from http import HTTPStatus
from itertools import pairwise

from outbox.base.database import Row
from outbox_lab.soak.domain import options_of
from outbox_lab.soak.record import RunRecord
from outbox_lab.soak.seen import WRONG_RESULT, Checked, Death, Injection, Problem, R, RowChange, TopicEvent

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
    "spark-master": {"cluster"},
    "spark-worker": {"cluster"},
}
# What no fault may bring about. The other checkers judge the rest, once everything has settled.
LOSSES = {"events-lost", "versions-missing", "versions-repeated", "keys-spread", "foreign-events"}


def faults_without_evidence(run: RunRecord) -> Iterator[str]:
    return (str(one) for one in run.injections if not one.evidence)


def unhealed_faults(run: RunRecord) -> Iterator[str]:
    return (str(one) for one in run.injections if one.evidence and not (one.is_healed or one.is_broken_off))


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
    match {sink.name: sink.repeats for sink in run.seen.sinks}.get(problem.sink or ""):
        case "none":
            return False
        case "re-reads":
            return not of.duplicates
        case _:
            return True


def unsent_invalid_records(run: RunRecord) -> Iterator[str]:
    sent = sum(one.invalid for one in run.injections)
    for one in run.checks:
        if one.malformed > sent:
            yield f"{one.when}: {one.malformed} records break the contract, and faults have sent {sent}"


def events_in_flight(run: RunRecord) -> Iterator[str]:
    return (one.in_flight for one in run.checks if one.in_flight)


# The service: answers to clients, and what the source has of them --------------------------------------------------

LAST = 20  # changes; clients that send at the same time are fewer


def contradicting_answers(run: RunRecord) -> Iterator[str]:
    for operation in run.history.operations.values():
        if len(operation.answers) > 1:
            yield f"{operation.key}: {', '.join(str(answer) for answer in operation.answers)}"


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


def accepted_misuses(run: RunRecord) -> Iterator[str]:
    for one in run.history.misuses:
        if one.outcome == "ok":
            yield f"{one.key}: {one.method} {one.path} with another body was answered {one.status}"


def keys_stored_twice(run: RunRecord) -> Iterator[str]:
    times = Counter(answer.key for answer in run.seen.source.answers)
    return (key for key, count in times.items() if count > 1)


def unsent_keys(run: RunRecord) -> Iterable[str]:
    return {answer.key for answer in run.seen.source.answers} - run.history.operations.keys()


def untrue_answers(run: RunRecord) -> Iterator[str]:
    """An acknowledged change is there. A refused one is not, and the refusal is the stored one if it is stored.

    A change with an unknown outcome is there or not: `incomplete_changes` demands that it is whole.
    """
    stored = {answer.key: answer for answer in run.seen.source.answers}
    for operation in run.history.operations.values():
        answer = stored.get(operation.key)
        is_made = answer is not None and answer.status < HTTPStatus.BAD_REQUEST
        if operation.outcome == "unknown":
            continue
        if answer is None:
            if operation.outcome == "ok":
                yield f"{operation.key}: acknowledged, and not there"
        elif operation.outcome == "failed" and is_made:
            yield f"{operation.key}: failed with {operation.answers[0][0]}, and is there"
        elif (answer.status, answer.body) not in operation.answers:
            yield f"{operation.key}: answered {operation.answers[0]}, and stored as {answer.status, answer.body}"


def untrue_reads(run: RunRecord) -> Iterable[str]:
    """The domain compares each read with the events, and with the changes acknowledged before it."""
    contradictions = options_of(run.domain).contradictions
    return contradictions(run.history, run.seen.firsts) if contradictions else ()


# The source: changes and their events ------------------------------------------------------------------------------


def changes_of_two_keys(run: RunRecord) -> Iterator[str]:
    return (change for change, keys in _promised(run).items() if keys > 1)


def changes_made_twice(run: RunRecord) -> Iterable[str]:
    return run.seen.source.changed_twice


def incomplete_changes(run: RunRecord) -> Iterable[str]:
    """The changes with an answer and no rows, or with rows and no answer."""
    return _promised(run).keys() ^ run.seen.source.changes.keys()


def _promised(run: RunRecord) -> Counter[str]:
    successes = (answer for answer in run.seen.source.answers if answer.status < HTTPStatus.BAD_REQUEST)
    return Counter(run.domain.change_of_answer(answer.body) for answer in successes)


def wrong_numbers_of_events(run: RunRecord) -> Iterator[str]:
    made, events = run.seen.source.changes, Counter(map(run.domain.change_of_event, run.seen.firsts.values()))
    for change in made.keys() | events.keys():
        if events.get(change, 0) != made.get(change, 0):
            yield f"{change}: {events.get(change, 0)} of {made.get(change, 0)} events"


# The topics of events ----------------------------------------------------------------------------------------------


def lost_events(run: RunRecord) -> Iterable[str]:
    """Events that the outbox has and no topic. Those that `outbox prune` has deleted: `wrong_numbers_of_events`."""
    return run.seen.source.outbox - run.seen.firsts.keys()


def differing_repeats(run: RunRecord) -> Iterator[str]:
    return _differing(run.seen.events, run.seen.firsts)


def unexplained_repeats(run: RunRecord) -> Iterator[str]:
    """With exactly-once a repeat has one reason: `outbox connect apply` has ended a hanging transaction.

    The task sends the events of that transaction again, all of them and before any other. So each transaction has at
    most one block of repeats in a partition.
    """
    return _unexplained(run, run.seen.events, run.seen.firsts)


def spread_keys(run: RunRecord) -> Iterator[str]:
    return (events[0].key for events in _by_key(run) if _is_spread(events))


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


def _is_spread(records: Sequence[R]) -> bool:
    return len({record.partition for record in records}) > 1


def _differing(records: Sequence[R], first: Mapping[str, R]) -> Iterator[str]:
    """The repeats that differ from the first in more than the offset."""
    for record in records:
        before = first[record.identity]
        if record is not before and replace(record, offset=before.offset) != before:
            yield f"{record.identity}: {before.place} and {record.place} differ"


def _unexplained(run: RunRecord, records: Sequence[R], first: Mapping[str, R]) -> Iterator[str]:
    """The beginnings of the blocks of repeats, of each partition with more blocks than released transactions."""
    for (topic, _), begun in _blocks(records, first).items() if run.plan.exactly_once else ():
        if len(begun) > run.seen.released.get(topic, 0):
            yield from (f"{record.identity} at {record.place}" for record in begun)


def _blocks(records: Sequence[R], first: Mapping[str, R]) -> Mapping[tuple[str, int], list[R]]:
    """By partition, the first record of each block.

    A block is a run of repeats with no other record between them. Their first records stand in the same order, with no
    other first record between them.
    """
    found: dict[tuple[str, int], list[R]] = {}
    numbers: dict[str, int] = {}  # by identity, the number of its first record among those of its partition
    counts: Counter[tuple[str, int]] = Counter()  # by partition, of these
    next_ones: dict[tuple[str, int], int] = {}  # by partition with an open block, the number that it goes on with
    for record in records:
        partition = record.topic, record.partition
        if record is first[record.identity]:
            numbers[record.identity] = counts[partition]
            counts[partition] += 1
            next_ones.pop(partition, None)
            continue
        number = numbers[record.identity]
        if next_ones.get(partition) != number:
            found.setdefault(partition, []).append(record)
        next_ones[partition] = number + 1
    return found


# The topics of captured tables -------------------------------------------------------------------------------------

# A change has no id: table, key, place in the log (LSN) and operation identify it. The source keeps only the state of a
# row. So the last change of each row is compared with it, and those before by the column that counts them, if there is
# one. A snapshot sends states and no changes: what is between two of them may be missing.
SNAPSHOT, CREATED, UPDATED, DELETED = "r", "c", "u", "d"
NEVER_BEFORE = {CREATED: {CREATED, UPDATED}, UPDATED: {DELETED}, DELETED: {DELETED}}


def rows_without_last_change(run: RunRecord) -> Iterator[str]:
    for copy in run.seen.copies:
        last = {change.key: change for change in run.seen.first_changes.values() if change.topic == copy.topic}
        source = {str(row[copy.key]): row for row in copy.source}
        for key in source.keys() | last.keys():
            if problem := _problem(source.get(key), last.get(key)):
                yield f"{key}: {problem}"


def _problem(row: Row | None, last: RowChange | None) -> str:
    """Why the last change of a row is not the one that has made it; empty if it is."""
    if last is None:
        return "no change is on the topic"
    if row is None or last.op == DELETED:
        is_right = row is None and last.op == DELETED
        return "" if is_right else f"{last.op} at {last.place} is the last, and the source has {row}"
    wrong = sorted(name for name in row if str(row[name]) != str(last.row.get(name)))
    return ", ".join(f"{name} is {last.row.get(name)} at {last.place}, and {row[name]} in the source" for name in wrong)


def differing_row_repeats(run: RunRecord) -> Iterator[str]:
    return _differing(run.seen.row_changes, run.seen.first_changes)


def unexplained_row_repeats(run: RunRecord) -> Iterator[str]:
    return _unexplained(run, run.seen.row_changes, run.seen.first_changes)


def spread_rows(run: RunRecord) -> Iterator[str]:
    return (f"{table} {key}" for (_, table, key), changes in _by_row(run) if _is_spread(changes))


def misborn_rows(run: RunRecord) -> Iterator[str]:
    """The first change of each row that is of a row which is not there, or that creates one which is.

    Behind a snapshot nobody knows: changes that it passes over may follow.
    """
    for _, changes in _by_row(run):
        before = DELETED
        for change in changes:
            if before in NEVER_BEFORE.get(change.op, ()):
                yield f"{change.identity} at {change.place}"
                break
            before = change.op


def disordered_rows(run: RunRecord) -> Iterator[str]:
    """The first change of each row that stands behind one with a higher place in the log.

    The place of a snapshot says nothing: a transaction that was open then may have written before it.
    """
    for _, changes in _by_row(run):
        streamed = [change for change in changes if change.op != SNAPSHOT]
        for before, change in pairwise(streamed):
            if change.lsn <= before.lsn:
                yield f"{change.identity} at {change.place}, behind {before.lsn}"
                break


def row_version_gaps(run: RunRecord) -> Iterator[str]:
    """The first update of each row whose version is neither that of the change before nor the next one."""
    columns = {copy.topic: copy.version for copy in run.seen.copies if copy.version is not None}
    for (topic, table, key), changes in _by_row(run):
        for before, change in pairwise(changes) if topic in columns else ():
            if change.op == UPDATED and before.op != DELETED:
                version, last = change.row[columns[topic]], before.row[columns[topic]]
                if not last <= version <= last + 1:
                    yield f"{table} {key}: {version} behind {last} at {change.place}"
                    break


def _by_row(run: RunRecord) -> Iterable[tuple[tuple[str, str, str], Sequence[RowChange]]]:
    """By topic, table and key: the changes of each row, each once, in the order of the topic."""
    found: dict[tuple[str, str, str], list[RowChange]] = defaultdict(list)
    for change in run.seen.first_changes.values():
        found[change.topic, change.table, change.key].append(change)
    return found.items()
