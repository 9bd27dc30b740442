"""The verdict on a run: the promises, each with its checker, and what the checkers find in the run's record."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

from outbox_lab.soak import checkers, sink_checkers
from outbox_lab.soak.domain import options_of
from outbox_lab.soak.history import SET_UP
from outbox_lab.soak.record import RunRecord
from outbox_lab.soak.seen import Sink

SHOWN = 5
Cases = Iterable[str]  # what violates a promise
Checker = Callable[[RunRecord], Cases]

# Judged in every run, even if nobody could read what it has left.
OF_RUN: Mapping[str, Checker] = {
    "a fault that began has happened": checkers.faults_without_evidence,
    "a fault is healed": checkers.unhealed_faults,
    "a process ends only by a fault": checkers.unexplained_deaths,
    "the check finds no loss": checkers.losses,
    "an invalid record is one of a fault": checkers.unsent_invalid_records,
    "the sinks catch up": checkers.events_in_flight,
}
OF_CHAIN: Mapping[str, Checker] = {
    "a key is answered once": checkers.contradicting_answers,
    "a request has a status that the domain expects": checkers.unexpected_statuses,
    "the service makes changes after the last fault": checkers.silence,
    "a used key is refused to another request": checkers.accepted_misuses,
    "a key is stored once": checkers.keys_stored_twice,
    "a stored key was sent by a client": checkers.unsent_keys,
    "an acknowledged change is there, a failed one is not": checkers.untrue_answers,
    "a read returns the truth": checkers.untrue_reads,
    "a change is made for one key": checkers.changes_of_two_keys,
    "the source has a change once": checkers.changes_made_twice,
    "a change is whole: its answer and its rows": checkers.incomplete_changes,
    "a change has its events, and an event its change": checkers.wrong_numbers_of_events,
    "an event of the outbox is on its topic": checkers.lost_events,
    "a repeated event is the same event": checkers.differing_repeats,
    "with exactly-once an event is on its topic once": checkers.unexplained_repeats,
    "the events of a key are on one partition": checkers.spread_keys,
    "the versions of a key are 1, 2, 3 and so on, in this order": checkers.version_gaps,
    "the last change of a row is on its topic": checkers.rows_without_last_change,
    "a repeated change of a row is the same change": checkers.differing_row_repeats,
    "with exactly-once a change of a row is on its topic once": checkers.unexplained_row_repeats,
    "the changes of a row are on one partition": checkers.spread_rows,
    "a row is created once, before its other changes, or is a snapshot's": checkers.misborn_rows,
    "the changes of a row are in the order of the log": checkers.disordered_rows,
    "the versions of a row have no gap": checkers.row_version_gaps,
}
OF_SINK: Mapping[str, Callable[[RunRecord, Sink], Cases]] = {
    "sets no valid event aside": sink_checkers.events_set_aside,
    "remembers every event": sink_checkers.forgotten_events,
    "applies every record": sink_checkers.miscounted_events,
    "has every event once": sink_checkers.events_not_once,
    "has the events of a key in their order": sink_checkers.disordered_effects,
}


def promises(run: RunRecord) -> Iterator[tuple[str, Callable[[], Cases]]]:
    """Each promise about what the run has left, with its checker. The domain's invariants are among them."""
    seen = run.seen
    for text, check in OF_CHAIN.items():
        yield text, partial(check, run)
    for invariant, rows in seen.source.violations.items():
        yield invariant, partial(tuple, rows)
    for copy in seen.copies:
        yield f"{copy.sink} has the rows of its table", partial(sink_checkers.wrong_rows, copy)
    for sink in seen.sinks:
        for text, check_sink in OF_SINK.items():
            yield f"{sink.name} {text}", partial(check_sink, run, sink)
        for one in sink.comparisons:
            text = f"{sink.name} has the {one.name} that its strategy promises"
            yield text, partial(sink_checkers.wrong_totals, run, sink, one)


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
    row_changes: int = 0  # of captured tables
    repeats: int = 0  # records on the topics that repeat an event, or a change of a row
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
        row_changes=len(seen.first_changes),
        repeats=len(seen.events) - len(seen.firsts) + len(seen.row_changes) - len(seen.first_changes),
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
