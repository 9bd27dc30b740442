"""The nemesis: it breaks the chain in an order that a seed decides, and notes that each fault has happened."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from outbox.base.terminal import Progress
from outbox.base.wait import nothing
from outbox_lab.soak.fault import Fault, Strike
from outbox_lab.soak.history import Injection
from outbox_lab.soak.testbed import Testbed

AT_ONCE = 3
BESIDE_SHARE = 1 / 3  # of the faults begin while others last
BESIDE_PAUSE = 0.3  # then the pause before it is this part of the usual one
POLL_S = 0.5
Watch = Callable[[], None]


@dataclass(frozen=True)
class Draw:
    """The next fault, as the seed decides it."""

    fault: str
    lasts_s: float
    pause_s: float  # before it
    is_beside: bool  # it begins while others last


def draws(seed: int, faults: Mapping[str, Fault], pause_s: float) -> Iterator[Draw]:
    """Every fault in a random order, and again in another one, without an end. ``pause_s`` is the mean pause."""
    chance = random.Random(seed)  # noqa: S311
    while faults:
        for name in chance.sample(sorted(faults), len(faults)):
            is_beside = chance.random() < BESIDE_SHARE
            mean_s = pause_s * BESIDE_PAUSE if is_beside else pause_s
            lasts_s = chance.uniform(*faults[name].lasts_s)
            yield Draw(name, lasts_s, chance.uniform(0.5, 1.5) * mean_s, is_beside)


class Nemesis:
    """Breaks a testbed. The seed decides the order of faults; what they cost decides how many there are."""

    def __init__(self, testbed: Testbed, faults: Mapping[str, Fault], seed: int, report: Progress) -> None:
        self._testbed = testbed
        self._faults = {name: one for name, one in faults.items() if one.is_possible(testbed)}
        self._seed = seed
        self._report = report
        self._is_ended = False
        self._stopped = threading.Event()
        self._done: list[Injection] = []
        self._lasting: list[str] = []
        if impossible := sorted(faults.keys() - self._faults.keys()):
            report(f"impossible on this chain: {', '.join(impossible)}")

    @property
    def injections(self) -> list[Injection]:
        """The faults that have begun and ended so far, in the order in which they began."""
        return sorted(self._done, key=lambda injection: injection.fired_s)

    @property
    def lasting(self) -> list[str]:
        """The names of the faults that last now."""
        return sorted(self._lasting)

    def run(self, duration_s: float, pause_s: float, watch: Watch = nothing) -> None:
        """Inject faults for ``duration_s``, or until `end`. Return when all that have begun by then are healed.

        The next fault is drawn when there is room for it. ``watch`` is called all the time meanwhile. If it raises, or
        after a signal, nothing more is broken or healed: everything is stopped then. The exception is raised once the
        faults that last have ended.
        """
        began_s = time.monotonic()
        until_s = began_s + duration_s
        running: set[Future[None]] = set()
        with ThreadPoolExecutor(AT_ONCE) as pool:
            try:
                for number, draw in enumerate(draws(self._seed, self._faults, pause_s)):
                    running = self._wait_for_room(running, AT_ONCE - 1 if draw.is_beside else 0, watch)
                    self._wait_until(min(time.monotonic() + draw.pause_s, until_s), watch)
                    running = _unfinished(running, 0)
                    if self._is_over(until_s):
                        break
                    watch()  # there may have been neither a wait nor a pause
                    running.add(pool.submit(self._inject, number, draw, began_s, until_s))
                if self._is_ended:
                    self._report(f"no fault begins any more; healing those that last: {self._now}")
                self._wait_for_room(running, 0, watch)
            except BaseException as error:
                self._stopped.set()
                self._report(
                    f"no fault begins any more ({type(error).__name__}); waiting for those under way: {self._now}"
                )
                raise

    def end(self) -> None:
        """Begin no further fault: `run` returns when all that have begun are healed."""
        self._is_ended = True  # and nothing else: a signal may be what calls this

    @property
    def _now(self) -> str:
        return ", ".join(self.lasting) or "none"

    def _is_over(self, until_s: float) -> bool:
        return self._is_ended or time.monotonic() >= until_s

    @staticmethod
    def _wait_for_room(running: set[Future[None]], at_most: int, watch: Watch) -> set[Future[None]]:
        """Wait until at most so many faults last. Returns these."""
        while len(running) > at_most:
            watch()
            running = _unfinished(running)
        return running

    def _wait_until(self, until_s: float, watch: Watch = nothing) -> None:
        """Wait until then, or until the run ends early or breaks off."""
        while not (self._stopped.is_set() or self._is_over(until_s)):
            watch()
            self._stopped.wait(min(POLL_S, max(0.0, until_s - time.monotonic())))

    def _inject(self, number: int, draw: Draw, began_s: float, until_s: float) -> None:
        fault = self._faults[draw.fault]
        strike = Strike(fault, self._testbed, random.Random(f"{self._seed} {number}"))  # noqa: S311
        with self._testbed.holding({*fault.parts, *fault.needs}):
            if self._stopped.is_set() or self._is_over(until_s):
                return  # it has waited for its parts for too long
            self._lasting.append(fault.name)
            try:
                fired_s = time.monotonic() - began_s
                evidence, problem = self._fire(strike)
                if evidence:
                    self._wait_until(time.monotonic() + draw.lasts_s)
                is_broken_off = self._stopped.is_set()
                is_healed = not is_broken_off and self._heal(strike)
                done = Injection(
                    fault.name,
                    evidence,
                    problem,
                    is_healed=is_healed,
                    is_broken_off=is_broken_off,
                    fired_s=fired_s,
                    healed_s=time.monotonic() - began_s,
                    parts=fault.parts,
                    victims=strike.victims,
                    invalid=strike.invalid,
                )
                self._done.append(done)
            finally:
                self._lasting.remove(fault.name)

    def _fire(self, strike: Strike) -> tuple[str, str]:
        """Break it. Returns the evidence, or the reason why it did not fire."""
        name = strike.fault.name
        try:
            evidence = strike.fault.inject(strike)
        except Exception as error:  # whatever it is, the run has not done what it promised
            problem = f"{type(error).__name__}: {error}"
            self._report(f"{name} did not happen: {problem}")
            return "", problem
        self._report(f"{name}: {evidence}")
        return evidence, ""

    def _heal(self, strike: Strike) -> bool:
        name = strike.fault.name
        try:
            strike.fault.heal(strike)
        except Exception as error:
            self._report(f"{name} is not healed: {type(error).__name__}: {error}")
            return False
        self._report(f"{name}: healed")
        return True


def _unfinished(running: set[Future[None]], timeout_s: float = POLL_S) -> set[Future[None]]:
    """The injections that still run when one has ended, or after a moment. Raises what one that has ended raised."""
    if not running:
        return running
    done, left = futures.wait(running, timeout_s, return_when=futures.FIRST_COMPLETED)
    for one in done:
        one.result()
    return left
