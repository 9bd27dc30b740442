"""The results of `outbox check` during a run. A rebuild or a rewind erases a loss of its sink: it is checked before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Problem:
    """A finding of the check."""

    code: str
    message: str
    sink: str | None = None
    count: int = 0
    keys: Sequence[str] = ()  # of the totals that drift


@dataclass(frozen=True)
class Checked:
    """One check. It is sound beside writers, and beside sinks that run or do not."""

    when: str
    duplicates: int = 0  # on the topics
    problems: Sequence[Problem] = ()
    in_flight: str = ""  # at the end: where events still were when the run gave up; empty before
    malformed: int = 0  # records on the topics that break the contract


def of_report(when: str, report: Mapping[str, Any], in_flight: str = "") -> Checked:
    """The check of a report, as JSON has it."""
    drifts = {
        (sink["name"], one["name"]): sorted(one["drift"]) for sink in report["sinks"] for one in sink["comparisons"]
    }
    problems = [
        Problem(
            one["code"],
            one["message"],
            one["sink"],
            one["count"],
            drifts.get((one["sink"], one["comparison"]), ()) if one["code"] == "sink-drift" else (),
        )
        for one in report["findings"]
    ]
    malformed = sum(one["malformed"]["count"] + one["malformed"]["acknowledged"] for one in report["topics"])
    return Checked(when, report["total"]["duplicates"], problems, in_flight, malformed)
