"""`outbox check` finds no loss at any time, and at the end the sinks have caught up.

A naive sink may drift. One that recognises re-reads alone may drift as soon as an event is on its topic twice. Hostile
records are no loss. Foreign events are: the check counts them as foreign where it can tell them from pruned ones, and
their totals as drift. Both are right for those that a fault has sent, and for no other. So are invalid records.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from outbox_lab.soak.checked import Checked, Problem
from outbox_lab.soak.finding import Finding, findings
from outbox_lab.soak.seen import Sink

# What no fault may bring about. `changes`, `arrival` and `results` judge the rest, once everything has settled.
LOSSES = {"events-lost", "versions-missing", "versions-repeated", "keys-spread", "foreign-events"}


def check(
    checks: Sequence[Checked],
    sinks: Sequence[Sink] | None,
    foreign: int = 0,
    foreign_keys: Collection[str] = (),
    invalid: int = 0,
) -> list[Finding]:
    """A finding of the losses, one of invalid records that no fault has sent, and one if the sinks did not catch up.

    ``sinks``: None if nobody knows which repeats they recognise; then no drift is judged. ``foreign``: the number of
    foreign events. ``foreign_keys``: those of their totals. ``invalid``: the number of invalid records from faults.
    """
    recognised = None if sinks is None else {sink.name: sink.repeats for sink in sinks}
    lost = (
        f"{one.when}: {problem.message}"
        for one in checks
        for problem in one.problems
        if _is_loss(problem, one, recognised) and not is_foreign(problem, foreign, foreign_keys)
    )
    return [
        *findings("the check finds no loss", lost),
        *findings("an invalid record is one of a fault", _unsent(checks, invalid)),
        *findings("the sinks catch up", (one.in_flight for one in checks if one.in_flight)),
    ]


def is_foreign(problem: Problem, foreign: int, foreign_keys: Collection[str]) -> bool:
    """Whether so many foreign events, with totals of these keys, explain a problem."""
    if problem.code == "sink-drift":
        return bool(problem.keys) and set(problem.keys).issubset(foreign_keys)
    return problem.code == "foreign-events" and problem.count <= foreign


def _unsent(checks: Sequence[Checked], invalid: int) -> Iterator[str]:
    for one in checks:
        if one.malformed > invalid:
            yield f"{one.when}: {one.malformed} records break the contract, and faults have sent {invalid}"


def _is_loss(problem: Problem, of: Checked, recognised: Mapping[str, str] | None) -> bool:
    if problem.code != "sink-drift":
        return problem.code in LOSSES
    if recognised is None:
        return False
    match recognised.get(problem.sink or ""):
        case "none":
            return False
        case "re-reads":
            return not of.duplicates
        case _:
            return True
