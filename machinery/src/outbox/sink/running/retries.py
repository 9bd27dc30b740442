"""Which failures of a running sink may pass, and when the sink tries again.

What may pass is decided here, by the failure's code, and nowhere else. Any other failure needs a person, or another
deployment: lost events, another driver, a statement that the database refuses.
"""

from __future__ import annotations

from collections import deque

PASSING = {
    "checkpoint-unavailable",  # its file system; what makes a checkpoint unusable does not pass
    "database-busy",  # a lock wait, a deadlock, no room
    "database-connection-lost",
    "database-silent",
    "database-unavailable",
    "fence-lingers",  # of our own last connection, which Postgres has not missed yet
    "kafka-unavailable",
    "producer-fenced",  # by a driver that has the fence; or a transaction took too long
    "sink-superseded",  # by a repair; the sink continues where that has set it
    "spark-failed",
    "table-failed",
    "table-locked",
    "token-server-unavailable",
    "topic-missing",  # also to a broker that has just started; one that was made again is another failure
    "topic-silent",
    "target-failed",  # what it writes to may be away
    "target-slow",
    "transform-failed",  # what it reads may be away
}
OF_PROCESS = {"event-loop-blocked"}  # what passes in another process alone
FIRST_DELAY_S = 1.0
MAX_DELAY_S = 60.0
FAILURES_MAX = 10
WITHIN_S = 30 * 60.0


class Retries:
    """The failures of one sink since it last applied a batch. Not for several threads at once."""

    def __init__(self) -> None:
        self._failed_at: deque[float] = deque()
        self.are_exhausted = False
        """Whether the sink has failed `FAILURES_MAX` times within `WITHIN_S`, each time in a way that may pass; or once
        in a way that passes in another process alone.
        """

    @property
    def count(self) -> int:
        """The number of failures."""
        return len(self._failed_at)

    def succeeded(self) -> None:
        """Forget the failures: the sink has applied a batch."""
        self._failed_at.clear()

    def delay_s(self, code: str, now_s: float) -> float | None:
        """Seconds until the next attempt after a failure, doubled each time; None if there is to be none.

        ``now_s`` is of the monotonic clock.
        """
        if code in OF_PROCESS:
            self.are_exhausted = True
        if code not in PASSING:
            return None
        while self._failed_at and now_s - self._failed_at[0] > WITHIN_S:
            self._failed_at.popleft()
        self._failed_at.append(now_s)
        self.are_exhausted = self.count >= FAILURES_MAX
        return None if self.are_exhausted else min(FIRST_DELAY_S * 2 ** (self.count - 1), MAX_DELAY_S)
