"""The meter of a drain: its time, and the processor time of its side and of the database."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import NamedTuple

import psutil
from outbox.base.errors import Failure
from outbox_lab.stack.process import Process

EVERY_S = 1.0


class Reading(NamedTuple):
    """The clocks when so many events were applied."""

    applied: int
    at_s: float
    own_cpu_s: float
    database_cpu_s: float


class Drain(NamedTuple):
    """One drain of a backlog. The rates are those of its second half, when JVMs have compiled what they run."""

    start_s: float  # from its start to its first commit
    start_cpu_s: float
    per_s: float
    cpu_s_per_million: float
    database_cpu_s_per_million: float


class Meter:
    """Notes the clocks at the start of a drain, at its first commit, half-way and at its end."""

    def __init__(self, events: int, database: Process) -> None:
        self.events = events
        self._database = database

    def start(self, own_cpu_s: Callable[[], float]) -> None:
        """The drain begins. ``own_cpu_s`` is the processor time of the side that drains."""
        self._own_cpu_s = own_cpu_s
        self._due = [0, 1, self.events // 2, self.events]
        self._readings: list[Reading] = []
        self.applied(0)

    def applied(self, count: int) -> None:
        """So many events are applied by now."""
        if self._due and count >= self._due[0]:
            reading = Reading(count, time.monotonic(), self._own_cpu_s(), cpu_s(self._database.processes()))
            while self._due and count >= self._due[0]:
                del self._due[0]
                self._readings.append(reading)

    def result(self) -> Drain:
        """The measured drain. Raises Failure if its second half was applied at once: then there is no rate."""
        start, first, middle, end = self._readings
        if middle.applied == end.applied:
            raise Failure(f"{self.events} events are too few to measure", "drain more", code="too-few-events")
        millions = (end.applied - middle.applied) / 1e6
        return Drain(
            start_s=first.at_s - start.at_s,
            start_cpu_s=first.own_cpu_s - start.own_cpu_s,
            per_s=1e6 * millions / (end.at_s - middle.at_s),
            cpu_s_per_million=(end.own_cpu_s - middle.own_cpu_s) / millions,
            database_cpu_s_per_million=(end.database_cpu_s - middle.database_cpu_s) / millions,
        )


class Stopwatch:
    """Runs from when it is made."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()

    def read(self, process: Process) -> tuple[float, float]:
        """The time since, and the processor time of a process that was begun since, in seconds."""
        return time.monotonic() - self._began_s, cpu_s(process.processes())


def cpu_s(processes: Iterable[psutil.Process]) -> float:
    """Processor time of processes and of their children that have ended, in seconds."""
    total = 0.0
    for process in processes:
        with suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def rarely(need: Callable[[], None]) -> Callable[[], None]:
    """The condition of a wait, asked a second after this call for the first time, and then once a second.

    To find a process takes some milliseconds of a core, which is more than some of the times that are measured.
    """
    due_s = time.monotonic() + EVERY_S

    def ask() -> None:
        nonlocal due_s
        if time.monotonic() >= due_s:
            need()
            due_s = time.monotonic() + EVERY_S

    return ask
