"""Reads the chain twice a second while a page is open, and publishes what has changed to the hub."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from demo.page.hub import Hub
from demo.page.probe import not_readable
from demo.page.readings import Readings
from demo.page.state import State

EVERY_S = 0.5
GAP_S = 15.0  # after so long without a reading, nobody knows when something happened
SETTLED_READINGS = 2  # one may have begun before
IDLE_S = 1.0  # how long it waits for somebody to look, before it looks whether it should end
STOP_TIMEOUT_S = 15.0  # a reading may wait for a part that does not answer
LOG = logging.getLogger(__name__)


class Poller:
    """One thread, however many look."""

    def __init__(self, read: Callable[[], Readings | None], hub: Hub) -> None:
        """``read`` returns None while there is nothing to read yet."""
        self._read, self._hub = read, hub
        self.state = State()
        self._ended = threading.Event()
        self._settled_after: Callable[[State], None] | None = None
        self._readings_settled = 0
        self._read_at_s = 0.0
        self.has_gap = False  # whether nobody looked for a while since `forget_settled`
        self._logged = ""  # the kind of error that the last reading ended with
        self._thread = threading.Thread(target=self._run, name="page-poller", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> bool:
        """End. Returns whether the reading under way has ended too; the wait for it is bounded."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(STOP_TIMEOUT_S)
        return not self._thread.is_alive()

    def forget_settled(self) -> None:
        """Something new begins: drop the report that still waits, because it would be about both."""
        self._settled_after = None
        self._read_at_s, self.has_gap = time.monotonic(), False

    def when_settled(self, report: Callable[[State], None]) -> None:
        """Call ``report`` once, after a later reading that finds nothing in flight and every sink running."""
        self._readings_settled, self._settled_after = 0, report

    def read_once(self) -> None:
        """Read, and publish."""
        readings = self._read()
        if readings is None:
            return
        self._publish(readings)
        now_s = time.monotonic()
        self.has_gap = self.has_gap or now_s - self._read_at_s > GAP_S
        self._read_at_s = now_s
        report = self._settled_after
        if report is not None:
            self._readings_settled = self._readings_settled + 1 if self.state.settled else 0
            if self._readings_settled >= SETTLED_READINGS:
                self._settled_after = None
                report(self.state)

    def _publish(self, readings: Readings) -> None:
        shown = self.state.apply(readings)
        self._hub.publish(shown.parts, shown.logs, shown.tables)

    def _run(self) -> None:
        while not self._ended.is_set():
            if self._hub.wait_for_subscribers(IDLE_S):
                self._read_or_say()
                self._ended.wait(EVERY_S)

    def _read_or_say(self) -> None:
        """Read. After an unexpected error every part is shown as down: the page must not freeze and look live."""
        try:
            self.read_once()
            self._logged = ""
        except Exception as error:
            kind = type(error).__name__
            if kind != self._logged:  # not twice a second
                LOG.exception("the page cannot read the chain")
            self._logged = kind
            self._publish(not_readable(f"the page cannot read it: {kind}"))
