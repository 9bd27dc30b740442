"""Starts processes again that have ended by themselves, as systemd, docker-compose or Kubernetes would, and applies the
connectors as an operator would: if a task does not run, and after a broker was killed.

It also notes when a process ends, even if another part restarts it: `checkers.unexplained_deaths` asks for the reason.
"""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

import psutil

from outbox.base.errors import Failure
from outbox.base.terminal import Progress
from outbox.relay.connectors import Connector
from outbox_lab.soak.history import Death
from outbox_lab.soak.testbed import Testbed
from outbox_lab.stack.process import MARK, Process, environment

INTERVAL_S = 1.0
PATIENCE_S = 15.0


@contextmanager
def keeping(testbed: Testbed, report: Progress) -> Iterator[list[Death]]:
    """Look after service, sinks and connectors until the end of the block, except while a fault breaks them.

    Returns the deaths, which are added to the list as they happen. The last look at the processes is at the end of the
    block. Raises Failure if it fails, because then a death may have been missed.
    """
    stopped = threading.Event()
    deaths: list[Death] = []

    def keep(look: Callable[[], None]) -> None:
        while not stopped.wait(INTERVAL_S):
            attempt(look, report)

    watch = Watch(_watched(testbed), deaths)
    watch()  # a process that ends before the first round counts too
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
    try:
        watch()
    except (psutil.Error, OSError) as error:
        raise Failure(f"nobody knows which processes have ended: {error}", code="soak-keeper-failed") from error


def attempt(look: Callable[[], None], report: Progress) -> None:
    """Look, and report what goes wrong. The next look comes soon, and a keeper that has ended would look no more."""
    try:
        look()
    except Exception as error:
        report(f"the keeper failed, and tries again: {type(error).__name__}: {error}")


class Watch:
    """Notes the deaths of processes: each that was there at the last look, and is gone or another one now. At the first
    look all must be there.
    """

    def __init__(self, processes: Mapping[str, Process], deaths: list[Death]) -> None:
        """``processes``: by mark."""
        self._processes = processes
        self._pids: Mapping[str, int | None] = dict.fromkeys(processes)
        self._deaths = deaths
        self._began_s = self._looked_s = time.monotonic()

    def __call__(self) -> None:
        """Look now."""
        looks_s = time.monotonic()
        found = leaders(set(self._processes))
        for mark, pid in self._pids.items():
            living = found.get(mark, [])
            if not living or (pid is not None and pid not in living):
                process = self._processes[mark]
                self.note(process.name, process.tail(1), alive_s=self._looked_s, ended_s=time.monotonic())
        self._looked_s = looks_s
        self._pids = {
            mark: self._pids[mark] if self._pids.get(mark) in pids else pids[0] for mark, pids in found.items()
        }

    def note(self, name: str, last_line: str, *, alive_s: float, ended_s: float) -> None:
        """Add a death between these two times of the monotonic clock."""
        self._deaths.append(Death(name, ended_s - self._began_s, last_line[:300], alive_s - self._began_s))


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
    return {one.mark: one for one in (*servers, testbed.service, *testbed.sinks)}


def _restart(testbed: Testbed, report: Progress) -> None:
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

    def __init__(self, testbed: Testbed, report: Progress, watch: Watch) -> None:
        self._testbed, self._report, self._watch = testbed, report, watch
        self._down_since_s: dict[str, float] = {}  # by name
        self._running_s: dict[str, float] = defaultdict(time.monotonic)  # by name, when it was last seen to run

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
        now_s, last_s = time.monotonic(), self._running_s[connector.name]
        if state.is_running:
            self._running_s[connector.name] = now_s
            self._down_since_s.pop(connector.name, None)
        elif now_s - (since_s := self._down_since_s.setdefault(connector.name, now_s)) > PATIENCE_S:
            why = state.error or f"it is {state.connector}"
            self._watch.note("connector", f"{connector.name}: {why}", alive_s=last_s, ended_s=since_s)
            del self._down_since_s[connector.name]
            self._report(f"connector {connector.name}: {self._testbed.apply_one(connector)}, because {why}")
