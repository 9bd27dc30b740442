"""Starts processes again that have ended by themselves, as systemd, docker-compose or Kubernetes would, and applies the
connector as an operator would: if its task does not run, and after a broker was killed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from outbox.base.errors import Failure
from outbox.soak.testbed import Testbed
from outbox.stack.stack import Report

INTERVAL_S = 1.0
PATIENCE_S = 15.0


@contextmanager
def keeping(testbed: Testbed, report: Report) -> Iterator[None]:
    """Look after service, sinks and connector until the end of the block, except while a fault breaks them."""
    stopped = threading.Event()

    def keep(look: Callable[[Testbed, Report], None]) -> None:
        while not stopped.wait(INTERVAL_S):
            look(testbed, report)

    looks = (_processes, _Connector())
    threads = [threading.Thread(target=keep, args=[look], name="keeper") for look in looks]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stopped.set()
        for thread in threads:
            thread.join()


def _processes(testbed: Testbed, report: Report) -> None:
    for part, processes in {"service": [testbed.service], "sinks": testbed.sinks}.items():
        with testbed.free(part) as is_free:
            for process in processes if is_free else ():
                if not process.is_running():
                    report(f"{process.name} has ended by itself and is started again: {process.tail(1)[:300]}")
                    try:
                        process.spawn()
                    except Failure as failure:  # its port is not free yet
                        report(f"{process.name} does not start: {failure}")


class _Connector:
    """Looks after the connector. It may start again by itself, and gets time for that."""

    def __init__(self) -> None:
        self._ran_s = time.monotonic()

    def __call__(self, testbed: Testbed, report: Report) -> None:
        with testbed.free("connect") as is_free, suppress(Failure, TimeoutError):  # what it needs may be broken
            state = testbed.relay_state() if is_free else None
            if state is None or state.is_running:
                self._ran_s = time.monotonic()
            is_down = time.monotonic() - self._ran_s > PATIENCE_S
            if state and (is_down or testbed.may_hang):
                why = state.error or f"it is {state.connector}" if is_down else "a broker was killed"
                report(f"connector: {testbed.apply()}, because {why}")
