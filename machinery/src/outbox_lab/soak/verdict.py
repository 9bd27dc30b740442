"""The verdict on a run: the promises, each with its checker, and what the checkers find in the run's record."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

from outbox_lab.soak import checkers
from outbox_lab.soak.domain import options_of
from outbox_lab.soak.history import SET_UP, Sink
from outbox_lab.soak.record import RunRecord

SHOWN = 5
Cases = Iterable[str]  # what violates a promise
Checker = Callable[[RunRecord], Cases]

# Judged in every run, even if nobody could read what it has left.
OF_RUN: Mapping[str, Checker] = {
    "a fault that began has happened": lambda run: (str(one) for one in run.injections if not one.evidence),
    "a fault is healed": checkers.unhealed_faults,
    "a process ends only by a fault": checkers.unexplained_deaths,
    "the check finds no loss": checkers.losses,
    "an invalid record is one of a fault": checkers.unsent_invalid_records,
    "the sinks catch up": lambda run: (one.in_flight for one in run.checks if one.in_flight),
}
OF_CHAIN: Mapping[str, Checker] = {
    "a key is answered once": checkers.contradicting_answers,
    "a request has a status that the domain expects": checkers.unexpected_statuses,
    "the service makes changes after the last fault": checkers.silence,
    "a used key is refused to another request": checkers.accepted_misuses,
    "a key is stored once": checkers.keys_stored_twice,
    "a stored key was sent by a client": lambda run: (
        {answer.key for answer in run.seen.source.answers} - run.history.operations.keys()
    ),
    "an acknowledged change is there, a failed one is not": checkers.untrue_answers,
    "a read returns the truth": checkers.untrue_reads,
    "a change is made for one key": checkers.changes_of_two_keys,
    "the source has a change once": lambda run: run.seen.source.changed_twice,
    "a change is whole: its answer and its rows": checkers.incomplete_changes,
    "a change has its events, and an event its change": checkers.wrong_numbers_of_events,
    # Of those that `outbox prune` has deleted: "a change has its events".
    "an event of the outbox is on its topic": lambda run: run.seen.source.outbox - run.seen.firsts.keys(),
    "a repeated event is the same event": checkers.differing_repeats,
    "with exactly-once an event is on its topic once": checkers.unexplained_repeats,
    "the events of a key are on one partition": checkers.spread_keys,
    "the versions of a key are 1, 2, 3 and so on, in this order": checkers.version_gaps,
}
OF_SINK: Mapping[str, Callable[[RunRecord, Sink], Cases]] = {
    "sets no valid event aside": lambda _, sink: sink.set_aside,
    "remembers every event": lambda _, sink: sink.forgotten - sink.set_aside,
    "applies every record": checkers.miscounted_events,
    "has every event once": checkers.events_not_once,
    "has the events of a key in their order": checkers.disordered_effects,
}


def promises(run: RunRecord) -> Iterator[tuple[str, Callable[[], Cases]]]:
    """Each promise about what the run has left, with its checker. The domain's invariants are among them."""
    seen = run.seen
    for text, check in OF_CHAIN.items():
        yield text, partial(check, run)
    for invariant, rows in seen.source.violations.items():
        yield invariant, partial(tuple, rows)
    for sink in seen.sinks:
        for text, check_sink in OF_SINK.items():
            yield f"{sink.name} {text}", partial(check_sink, run, sink)
        for one in sink.comparisons:
            text = f"{sink.name} has the {one.name} that its strategy promises"
            yield text, partial(checkers.wrong_totals, run, sink, one)


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
                found.append(Finding(promise, len(cases), cases[:SHOWN]))
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
