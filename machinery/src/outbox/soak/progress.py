"""What a run says of itself every minute, for those who follow it for hours."""

from __future__ import annotations

import time
from collections.abc import Callable

from outbox.soak.history import Recorder
from outbox.soak.nemesis import Nemesis

INTERVAL_S = 60.0


class Progress:
    """Reports how many requests and faults there were so far, and what is broken now."""

    def __init__(self, recorder: Recorder, nemesis: Nemesis, report: Callable[[str], None]) -> None:
        self._recorder, self._nemesis = recorder, nemesis
        self._report = sparse(report)

    def __call__(self) -> None:
        """Report, if it is time for it."""
        self._report(self.text)

    @property
    def text(self) -> str:
        """The state now."""
        outcomes = self._recorder.outcomes
        return (
            f"{outcomes.total()} requests: {outcomes['ok']} ok, {outcomes['failed']} failed, {outcomes['unknown']}"
            f" unknown; {len(self._nemesis.injections)} faults are over; now: "
            f"{', '.join(self._nemesis.lasting) or 'no fault'}"
        )


def sparse(report: Callable[[str], None]) -> Callable[[str], None]:
    """Report at most one line a minute, and drop the others."""
    next_s = time.monotonic() + INTERVAL_S

    def one(text: str) -> None:
        nonlocal next_s
        if time.monotonic() >= next_s:
            next_s = time.monotonic() + INTERVAL_S
            report(text)

    return one
