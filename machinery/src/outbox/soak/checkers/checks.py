"""`outbox check` finds no loss at any time, and at the end the sinks have caught up.

A naive sink may drift. One that recognises re-reads alone may drift as soon as an event is on its topic twice. Hostile
records are no loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from outbox.soak.checked import Checked, Problem
from outbox.soak.finding import Finding, findings
from outbox.soak.seen import Sink

# What no fault may bring about. `changes`, `arrival` and `results` judge the rest, once everything has settled.
LOSSES = {"events-lost", "versions-missing", "versions-repeated", "keys-spread", "foreign-events"}


def check(checks: Sequence[Checked], sinks: Sequence[Sink]) -> list[Finding]:
    """A finding of the losses, and one if the sinks did not catch up."""
    recognised = {sink.name: sink.repeats for sink in sinks}
    lost = (
        f"{one.when}: {problem.message}"
        for one in checks
        for problem in one.problems
        if _is_loss(problem, one, recognised)
    )
    return [
        *findings("the check finds no loss", lost),
        *findings("the sinks catch up", (one.in_flight for one in checks if one.in_flight)),
    ]


def _is_loss(problem: Problem, of: Checked, recognised: Mapping[str, str]) -> bool:
    if problem.code != "sink-drift":
        return problem.code in LOSSES
    match recognised.get(problem.sink or ""):
        case "none":
            return False
        case "re-reads":
            return not of.duplicates
        case _:
            return True
