"""Restart a connector's task that the broker has forgotten.

A broker forgets a transactional id that nobody has used for a week (`transactional.id.expiration.ms`), also that of a
running task that has had nothing to relay. The task's next transaction fails then, and Connect restarts no failed task.
Nothing is lost: a restarted task registers its id again, and continues at its stored offset.

No other failure is restarted here. Debezium would make a missing slot again without its events, so `apply` looks at
the slot first. A slot that a task reads until it fails in this way cannot have been dropped.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import suppress

from outbox.base.errors import Failure
from outbox.base.settings import Settings
from outbox.relay import connectors
from outbox.relay.connectors import Connector
from outbox.relay.rest import Rest

FORGOTTEN = "InvalidPidMappingException"
RESTARTS_MAX = 3
WITHIN_S = 3600.0


class Restarts:
    """The restarts of all connectors. Not for several threads at once."""

    def __init__(self, settings: Settings, on_restart: Callable[[str, str], None]) -> None:
        """``on_restart`` is called with the name of each connector that was restarted, and the error of its task."""
        self._on_restart = on_restart
        self._rests = {one.name: Rest(settings, one) for one in _all(settings)}
        self._restarted_at: dict[str, deque[float]] = defaultdict(deque)

    def look(self, now_s: float) -> None:
        """Restart what has failed in this way, each connector `RESTARTS_MAX` times within `WITHIN_S` at most.

        ``now_s`` is of the monotonic clock. A Connect that does not answer is asked again at the next look.
        """
        for name, rest in self._rests.items():
            with suppress(Failure):
                error = rest.state().error
                if error is not None and FORGOTTEN in error and self.allows(name, now_s):
                    rest.restart_task()
                    self.count(name, now_s)
                    self._on_restart(name, error)

    def allows(self, name: str, now_s: float) -> bool:
        """Whether a connector may be restarted once more."""
        times = self._restarted_at[name]
        while times and now_s - times[0] > WITHIN_S:
            times.popleft()
        return len(times) < RESTARTS_MAX

    def count(self, name: str, now_s: float) -> None:
        """Count a restart."""
        self._restarted_at[name].append(now_s)


def _all(settings: Settings) -> list[Connector]:
    return [connectors.load(settings), *connectors.others(settings)]
