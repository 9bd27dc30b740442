"""Starts again what has ended by itself, as systemd, docker-compose or Kubernetes would."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from outbox.base.errors import Failure
from outbox.soak.testbed import Testbed

INTERVAL_S = 1.0


@contextmanager
def keeping(testbed: Testbed, report: Callable[[str], None]) -> Iterator[None]:
    """Look after the service and the sinks until the end of the block, except while a fault breaks them."""
    stopped = threading.Event()

    def keep() -> None:
        while not stopped.wait(INTERVAL_S):
            for part, processes in {"service": [testbed.service], "sinks": testbed.sinks}.items():
                with testbed.free(part) as is_free:
                    for process in processes if is_free else ():
                        if not process.is_running():
                            end = process.tail(1)
                            report(f"{process.name} has ended by itself and is started again: {end[:300]}")
                            try:
                                process.spawn()
                            except Failure as failure:  # its port is not free yet
                                report(f"{process.name} does not start: {failure}")

    thread = threading.Thread(target=keep, name="keeper")
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()
