"""An experiment: what is done, what is expected, and a function that does it and returns what was seen."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

Report = Callable[[str], None]
AS_EXPECTED, NOT_AS_EXPECTED, NO_VERDICT = "as expected", "NOT as expected", "no verdict"


class Seen(NamedTuple):
    """The result of an experiment, in words and numbers, and whether it was expected."""

    text: str
    is_expected: bool


class NotFired(Exception):
    """A fault that was planned has not happened: the experiment shows nothing."""


class Row(NamedTuple):
    """A row of the table."""

    name: str
    done: str
    expected: str
    seen: str = ""
    verdict: str = ""


@dataclass(frozen=True)
class Experiment:
    """One experiment on a stack of its own. ``run`` takes the number of events, and a function that reports steps."""

    name: str
    done: str  # with the number of events as {events}
    expected: str
    events: int
    run: Callable[[int, Report], Seen]

    def planned(self, events: int | None = None) -> Row:
        """The row before the experiment has run, with fewer events if a number is given."""
        return Row(self.name, self.done.format(events=f"{self._number(events):,}"), self.expected)

    def result(self, report: Report, events: int | None = None) -> Row:
        """Run it. An error, or a fault that has not fired, gives no verdict."""
        row = self.planned(events)
        try:
            seen = self.run(self._number(events), report)
        except Exception as error:  # the other experiments can still run
            report(traceback.format_exc())
            return row._replace(seen=f"{type(error).__name__}: {error}", verdict=NO_VERDICT)
        return row._replace(seen=seen.text, verdict=AS_EXPECTED if seen.is_expected else NOT_AS_EXPECTED)

    def _number(self, events: int | None) -> int:
        return self.events if events is None else min(events, self.events)
