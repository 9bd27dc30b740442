"""Starts processes again that have ended by themselves, as systemd, docker-compose or Kubernetes would, and applies the
connector as an operator would: after its task has failed, and after a broker was killed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from outbox.base.errors import Failure
from outbox.soak.testbed import Testbed
from outbox.stack.stack import Report

INTERVAL_S = 1.0


@contextmanager
def keeping(testbed: Testbed, report: Report) -> Iterator[None]:
    """Look after service, sinks and connector until the end of the block, except while a fault breaks them."""
    stopped = threading.Event()

    def keep(look: Callable[[Testbed, Report], None]) -> None:
        while not stopped.wait(INTERVAL_S):
            look(testbed, report)

    threads = [threading.Thread(target=keep, args=[look], name=look.__name__) for look in (_processes, _connector)]
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


def _connector(testbed: Testbed, report: Report) -> None:
    with testbed.free("connect") as is_free, suppress(Failure, TimeoutError):  # what it needs may be broken
        error = testbed.relay_state().error if is_free else None
        if error or (is_free and testbed.may_hang):
            report(f"connector: {testbed.apply()}, because {error or 'a broker was killed'}")
