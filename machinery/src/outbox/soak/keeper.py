"""Starts processes again that have ended by themselves, as systemd, docker-compose or Kubernetes would, and applies the
connectors as an operator would: if a task does not run, and after a broker was killed.

It also notes when a process ends, whoever starts it again: the checker `deaths` asks for the reason.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

import psutil

from outbox.base.errors import Failure
from outbox.relay.connectors import Connector
from outbox.soak.death import Death
from outbox.soak.testbed import Testbed
from outbox.stack.process import MARK, Process, environment
from outbox.stack.stack import Report

INTERVAL_S = 1.0
PATIENCE_S = 15.0


@contextmanager
def keeping(testbed: Testbed, report: Report) -> Iterator[list[Death]]:
    """Look after service, sinks and connectors until the end of the block, except while a fault breaks them.

    Returns the deaths, which are added to the list as they happen.
    """
    stopped = threading.Event()
    deaths: list[Death] = []

    def keep(look: Callable[[], None]) -> None:
        while not stopped.wait(INTERVAL_S):
            look()

    watch = Watch(_watched(testbed), deaths)
    looks = (watch, lambda: _restart(testbed, report), _Connectors(testbed, report, watch))
    threads = [threading.Thread(target=keep, args=[look], name="keeper") for look in looks]
    for thread in threads:
        thread.start()
    try:
        yield deaths
    finally:
        stopped.set()
        for thread in threads:
            thread.join()


class Watch:
    """Notes the deaths of processes: each that was there at the last look, and is gone or another one now."""

    def __init__(self, processes: Mapping[str, Process], deaths: list[Death]) -> None:
        """``processes``: by mark."""
        self._processes = processes
        self._pids: Mapping[str, int] = {}
        self._deaths = deaths
        self._began_s = time.monotonic()

    def __call__(self) -> None:
        """Look now."""
        found = leaders(set(self._processes))
        for mark, pid in self._pids.items():
            if pid not in found.get(mark, ()):
                process = self._processes[mark]
                self.note(process.name, process.tail(1))
        self._pids = {
            mark: self._pids[mark] if self._pids.get(mark) in pids else pids[0] for mark, pids in found.items()
        }

    def note(self, name: str, last_line: str, ago_s: float = 0.0) -> None:
        """Add a death, which was so long ago."""
        self._deaths.append(Death(name, time.monotonic() - self._began_s - ago_s, last_line[:300]))


def leaders(marks: set[str]) -> dict[str, list[int]]:
    """By mark, the leaders of sessions that live, the oldest first: one look at the table of processes.

    The oldest is the main process. A new backend of Postgres is another one, until it overwrites its environment.
    """
    found: dict[str, list[tuple[float, int]]] = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):
            if os.getsid(process.pid) == process.pid and process.status() != psutil.STATUS_ZOMBIE:
                mark = environment(process).get(MARK)
                if mark in marks:
                    found.setdefault(mark, []).append((process.create_time(), process.pid))
    return {mark: [pid for _, pid in sorted(pids)] for mark, pids in found.items()}


def _watched(testbed: Testbed) -> dict[str, Process]:
    servers = [testbed.stack.part(name) for name in ("postgres", "kafka", "connect")]
    return {one.mark: one for one in (*servers, testbed.service, *testbed.sinks, *testbed.cluster)}


def _restart(testbed: Testbed, report: Report) -> None:
    for part, processes in {"service": [testbed.service], "sinks": testbed.sinks}.items():
        with testbed.free(part) as is_free:
            found = leaders({process.mark for process in processes}) if is_free else {}
            for process in processes if is_free else ():
                if process.mark not in found:
                    report(f"{process.name} has ended by itself and is started again: {process.tail(1)[:300]}")
                    try:
                        process.spawn()
                    except Failure as failure:  # its port is not free yet
                        report(f"{process.name} does not start: {failure}")


class _Connectors:
    """Looks after the connectors. Each may start again by itself, and gets time for that."""

    def __init__(self, testbed: Testbed, report: Report, watch: Watch) -> None:
        self._testbed, self._report, self._watch = testbed, report, watch
        self._down_since_s: dict[str, float] = {}  # by name

    def __call__(self) -> None:
        testbed = self._testbed
        with testbed.free("connect") as is_free:
            if not is_free:
                self._down_since_s.clear()
                return
            for connector in testbed.connectors:
                with suppress(Failure, TimeoutError):  # what it needs may be broken
                    self._look(connector)
            with suppress(Failure, TimeoutError):
                if testbed.may_hang:
                    self._report(f"connectors: {testbed.apply()}, because a broker was killed")

    def _look(self, connector: Connector) -> None:
        state = self._testbed.relay_state(connector)
        down_s = self._down_s(connector.name, is_running=state.is_running)
        if down_s > PATIENCE_S:
            why = state.error or f"it is {state.connector}"
            self._watch.note("connector", f"{connector.name}: {why}", ago_s=down_s)
            del self._down_since_s[connector.name]
            self._report(f"connector {connector.name}: {self._testbed.apply_one(connector)}, because {why}")

    def _down_s(self, name: str, *, is_running: bool) -> float:
        """For how long it has been seen down."""
        now_s = time.monotonic()
        if is_running:
            self._down_since_s.pop(name, None)
            return 0.0
        return now_s - self._down_since_s.setdefault(name, now_s)
