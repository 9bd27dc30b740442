"""The nemesis: it breaks the chain by a schedule that a seed decides, and notes that each fault has happened."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from outbox.soak.fault import Fault
from outbox.soak.faults import Make
from outbox.soak.injection import Injection, Planned
from outbox.soak.testbed import Testbed

AT_ONCE = 3
Report = Callable[[str], None]


def schedule(seed: int, faults: Mapping[str, Make], duration_s: float, pause_s: float) -> list[Planned]:
    """Every fault in a random order, and again in another one, until the time is over.

    ``pause_s`` is the mean time from the end of a fault to the beginning of the next. Every third fault begins while
    the one before it lasts.
    """
    chance = random.Random(seed)  # noqa: S311
    planned: list[Planned] = []
    at_s = chance.uniform(0.5, 1.0) * pause_s
    for number, name in enumerate(_in_turns(chance, sorted(faults))):
        lasts_s = chance.uniform(*faults[name]().lasts_s)
        if at_s + lasts_s > duration_s:
            break
        planned.append(Planned(round(at_s, 1), round(lasts_s, 1), name))
        overlaps = number % 3 == 1
        at_s += chance.uniform(0.2, 0.8) * lasts_s if overlaps else lasts_s + chance.uniform(0.5, 1.5) * pause_s
    return planned


def _in_turns(chance: random.Random, faults: Sequence[str]) -> Iterator[str]:
    while faults:
        yield from chance.sample(faults, len(faults))


class Nemesis:
    """Runs a schedule on a testbed."""

    def __init__(self, testbed: Testbed, faults: Mapping[str, Make], seed: int, report: Report) -> None:
        self._testbed = testbed
        self._faults = faults
        self._seed = seed
        self._report = report
        self._stopped = threading.Event()
        self.injections: list[Injection] = []

    def run(self, planned: Sequence[Planned], began_s: float) -> None:
        """Inject each fault when it is due, or as soon as its parts are free; return when all are healed.

        ``began_s`` is when the run began, by the monotonic clock.
        """
        with ThreadPoolExecutor(AT_ONCE) as pool, self._ending_if_interrupted():
            running = []
            for number, one in enumerate(planned):
                time.sleep(max(0.0, began_s + one.at_s - time.monotonic()))
                running.append(pool.submit(self._inject, number, one, began_s))
            for done in running:
                self.injections.append(done.result())

    @contextmanager
    def _ending_if_interrupted(self) -> Iterator[None]:
        """Break and heal nothing more after Ctrl-C: everything is stopped then."""
        try:
            yield
        except BaseException:
            self._stopped.set()
            raise

    def _inject(self, number: int, planned: Planned, began_s: float) -> Injection:
        fault = self._faults[planned.fault]()
        with self._testbed.holding(fault.parts):
            if self._stopped.is_set():
                return Injection(planned, problem="the run was interrupted")
            evidence = problem = ""
            fired_s = time.monotonic() - began_s
            try:
                chance = random.Random(f"{self._seed} {number}")  # noqa: S311
                evidence = fault.fire(self._testbed, chance)
                self._report(f"{planned.fault}: {evidence}")
                self._stopped.wait(planned.lasts_s)
            except Exception as error:  # whatever it is, the run has not done what it promised
                problem = f"{type(error).__name__}: {error}"
                self._report(f"{planned.fault} did not happen: {problem}")
            is_healed = not self._stopped.is_set() and self._heal(fault)
            return Injection(planned, evidence, problem, is_healed, fired_s, time.monotonic() - began_s)

    def _heal(self, fault: Fault) -> bool:
        try:
            fault.heal(self._testbed)
        except Exception as error:
            self._report(f"{fault.name} is not healed: {type(error).__name__}: {error}")
            return False
        return True
