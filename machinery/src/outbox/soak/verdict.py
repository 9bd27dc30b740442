"""The verdict on a run: what the checkers say of its files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from outbox.soak.checkers import answers, arrival, changes, faults, invariants, order, reads, results
from outbox.soak.domain import Domain
from outbox.soak.finding import Finding
from outbox.soak.history import History
from outbox.soak.injection import Injection
from outbox.soak.seen import Seen

Result = Literal["valid", "invalid", "unknown"]


@dataclass(frozen=True)
class Verdict:
    """``valid``: every promise held and every planned fault happened. ``unknown``: the run cannot be judged."""

    result: Result
    findings: Sequence[Finding] = ()
    operations: int = 0
    unknown_operations: int = 0
    events: int = 0
    repeats: int = 0  # records on the topics that repeat an event
    faults: int = 0
    why_unknown: str = ""


def judge(
    domain: Domain, history: History, seen: Seen, injections: Sequence[Injection], *, may_repeat: bool
) -> Verdict:
    """Let every checker look. ``may_repeat``: whether the relay may have brought an event twice."""
    found = [
        *faults.check(injections),
        *answers.check(history, seen.source),
        *changes.check(domain, seen),
        *arrival.check(seen, may_repeat=may_repeat),
        *order.check(seen),
        *invariants.check(seen.source),
        *reads.check(domain, history, seen),
        *results.check(seen),
    ]
    outcomes = Counter(operation.outcome for operation in history.operations.values())
    is_judged = found or outcomes["ok"]
    return Verdict(
        "invalid" if found else "valid" if is_judged else "unknown",
        found,
        operations=outcomes.total(),
        unknown_operations=outcomes["unknown"],
        events=len(seen.firsts),
        repeats=len(arrival.repeats(seen)),
        faults=len(injections),
        why_unknown="" if is_judged else "no operation succeeded",
    )
