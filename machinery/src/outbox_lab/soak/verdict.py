"""The verdict on a run: what the checkers say of its record."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from outbox_lab.soak.checked import Checked
from outbox_lab.soak.checkers import (
    answers,
    arrival,
    captured,
    changes,
    checks,
    copies,
    deaths,
    faults,
    foreign,
    invariants,
    order,
    reads,
    results,
)
from outbox_lab.soak.death import Death
from outbox_lab.soak.domain import Domain, contradictions_of
from outbox_lab.soak.finding import Finding
from outbox_lab.soak.foreign import keys_of_totals
from outbox_lab.soak.history import SET_UP, History
from outbox_lab.soak.injection import Injection
from outbox_lab.soak.seen import Seen

Result = Literal["valid", "invalid", "unknown"]
# A fault of one of these may let sinks read records again: they repeat a batch if they do not know its outcome.
REREADING = {"sinks", "postgres", "kafka", "sinks-postgres", "sinks-kafka"}


@dataclass(frozen=True)
class RunRecord:
    """Everything that is judged."""

    history: History = field(default_factory=History)
    seen: Seen = field(default_factory=Seen)
    injections: Sequence[Injection] = ()
    deaths: Sequence[Death] = ()
    checks: Sequence[Checked] = ()
    selected: Sequence[str] = ()
    """The faults that were asked for."""
    may_repeat: bool = False
    """Whether the relay may bring an event twice: Connect's exactly-once was off."""

    timeout_scale: float = 1.0
    """What multiplied every deadline."""

    @property
    def invalid(self) -> int:
        """How many records the faults have sent that `outbox check` may not take as events."""
        return sum(one.invalid + len(one.foreign) for one in self.injections)

    @property
    def may_reread(self) -> bool:
        """Whether something may have let sinks read records again."""
        return any(not REREADING.isdisjoint(one.parts) for one in self.injections) or any(
            one.part in REREADING for one in self.deaths
        )


@dataclass(frozen=True)
class Verdict:
    """``valid``: every promise held, and every fault that began has happened. ``unknown``: the run cannot be judged."""

    result: Result
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


def judge(domain: Domain, record: RunRecord) -> Verdict:
    """Let every checker look."""
    history, seen = record.history, record.seen
    may_repeat, may_reread = record.may_repeat, record.may_reread
    sent, keys, invalid = len(seen.foreign), seen.foreign_keys, record.invalid
    found, failed = _found(
        {
            "faults": lambda: faults.check(record.injections),
            "deaths": lambda: deaths.check(record.deaths, record.injections, record.timeout_scale),
            "checks": lambda: checks.check(record.checks, seen.sinks, sent, keys, invalid),
            "answers": lambda: answers.check(history, seen.source),
            "changes": lambda: changes.check(domain, seen),
            "arrival": lambda: arrival.check(seen, may_repeat=may_repeat),
            "order": lambda: order.check(seen),
            "captured": lambda: captured.check(seen, may_repeat=may_repeat),
            "copies": lambda: copies.check(seen),
            "invariants": lambda: invariants.check(seen.source),
            "reads": lambda: reads.check(domain, history, seen),
            "results": lambda: results.check(seen, may_reread=may_reread),
            "foreign": lambda: foreign.check(seen, may_reread=may_reread),
        }
    )
    outcomes = Counter(operation.outcome for operation in history.operations.values())
    missed = faults.not_happened(record.selected, record.injections)
    why_unknown = failed or ("" if found else _lacking(domain, record, missed))
    return Verdict(
        "invalid" if found else "unknown" if why_unknown else "valid",
        found,
        operations=outcomes.total(),
        unknown_operations=outcomes["unknown"],
        events=len(seen.firsts),
        row_changes=len(seen.first_changes),
        repeats=len(seen.events) - len(seen.firsts) + len(seen.row_changes) - len(seen.first_changes),
        faults=len(record.injections),
        selected=len(record.selected),
        not_happened=missed,
        why_unknown=why_unknown,
    )


def _found(checkers: Mapping[str, Callable[[], Sequence[Finding]]]) -> tuple[list[Finding], str]:
    """What the checkers find, and which of them have failed: an answer may be nothing that the domain knows."""
    found: list[Finding] = []
    failed: list[str] = []
    for name, check in checkers.items():
        try:
            found += check()
        except Exception as error:
            *_, frame = traceback.extract_tb(error.__traceback__)
            where = f"{frame.filename}:{frame.lineno}"
            failed.append(f"the checker {name} failed: {type(error).__name__}: {error} at {where}")
    return found, "; ".join(failed)


def broken_off(record: RunRecord, why: str) -> Verdict:
    """The verdict on a run that could not read what was left: by its faults, the deaths, and the checks so far."""
    sent = [one for fault in record.injections for one in fault.foreign]
    keys = {key for one in sent for key in keys_of_totals(one.key, one.totals)}
    found = [
        *faults.check(record.injections),
        *deaths.check(record.deaths, record.injections, record.timeout_scale),
        *checks.check(record.checks, None, len(sent), keys, record.invalid),
    ]
    return Verdict(
        "invalid" if found else "unknown",
        found,
        faults=len(record.injections),
        selected=len(record.selected),
        not_happened=faults.not_happened(record.selected, record.injections),
        why_unknown=why,
    )


def _lacking(domain: Domain, record: RunRecord, missed: Sequence[str]) -> str:
    """What a run without findings lacks to be valid. The operations that set it up do not count."""
    if not record.seen.sinks:
        return "no sink was looked at"
    sent = [operation for operation in record.history.operations.values() if operation.attempts[0].client != SET_UP]
    if not any(operation.outcome == "ok" for operation in sent):
        return "no operation succeeded"
    if contradictions_of(domain) and not any(read.outcome == "ok" for read in record.history.reads):
        return "no read succeeded"
    if record.selected and len(missed) == len(record.selected):
        return "no fault happened"
    return ""
