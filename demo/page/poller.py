"""Reads the chain twice a second while a page is open, and publishes what has changed to the hub."""

from __future__ import annotations

import threading
from collections.abc import Callable

from demo.page.hub import Hub
from demo.page.readings import Readings
from demo.page.state import State

EVERY_S = 0.5
SETTLED_READINGS = 2  # one may have begun before
IDLE_S = 1.0  # how long it waits for somebody to look, before it looks whether it should end


class Poller:
    """One thread, however many look."""

    def __init__(self, read: Callable[[], Readings | None], hub: Hub) -> None:
        """``read`` returns None while there is nothing to read yet."""
        self._read, self._hub = read, hub
        self.state = State()
        self._ended = threading.Event()
        self._settled_after: Callable[[State], None] | None = None
        self._readings_settled = 0
        self._thread = threading.Thread(target=self._run, name="page-poller", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End, and wait for the reading that is under way."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def when_settled(self, report: Callable[[State], None]) -> None:
        """Call ``report`` once, after a later reading that finds nothing in flight and every sink running."""
        self._readings_settled, self._settled_after = 0, report

    def read_once(self) -> None:
        """Read, and publish."""
        readings = self._read()
        if readings is None:
            return
        shown = self.state.apply(readings)
        self._hub.publish(shown.parts, shown.logs, shown.tables)
        if self._settled_after is not None:
            self._readings_settled = self._readings_settled + 1 if self.state.settled else 0
            if self._readings_settled >= SETTLED_READINGS:
                report, self._settled_after = self._settled_after, None
                report(self.state)

    def _run(self) -> None:
        while not self._ended.is_set():
            if self._hub.wait_for_subscribers(IDLE_S):
                self.read_once()
                self._ended.wait(EVERY_S)
