"""A fault is one way to break the chain, with evidence. The nemesis injects faults in an order that a seed decides."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

import psycopg2

from outbox.base.errors import Failure
from outbox.base.terminal import Progress
from outbox.base.wait import nothing, wait_for
from outbox_lab.soak.history import Injection
from outbox_lab.soak.testbed import Done, Testbed
from outbox_lab.stack import interrupt
from outbox_lab.stack.process import Process

T = TypeVar("T")


class NotFired(Exception):
    """A fault has not happened. The message says why."""


@dataclass(frozen=True)
class Fault:
    """One way to break the chain: a row of the table in `outbox_lab.soak.faults`."""

    name: str
    summary: str
    # Break it, and return the evidence. Raises NotFired without any.
    inject: Callable[[Strike], str]
    # Undo it, and return once the part works again. Also called if ``inject`` has failed. Some pass by themselves.
    heal: Callable[[Strike], None] = lambda _: None
    # What it breaks. Each may end what depends on it, and no other fault breaks it at the same time.
    parts: tuple[str, ...] = ()
    # What else no other fault may break meanwhile, because this one needs it.
    needs: tuple[str, ...] = ()
    lasts_s: tuple[float, float] = (0.0, 0.0)  # from, to: how long it lasts before it is healed
    is_possible: Callable[[Testbed], object] = lambda _: True  # on this chain; else it is never drawn


@dataclass
class Strike:
    """One injection of a fault, and what becomes known of it meanwhile."""

    fault: Fault
    testbed: Testbed
    chance: random.Random
    victims: tuple[str, ...] = ()  # the processes of the fault's parts that it may end; without any, all of them
    invalid: int = 0  # how many invalid records it has sent, or may have sent
    sink: str = ""  # that it has chosen
    letters: set[str] = field(default_factory=set)  # the identities of dead letters that its records have become

    @property
    def part(self) -> str:
        """The one part that the fault breaks."""
        return self.fault.parts[0]

    @property
    def server(self) -> Process:
        """The process of that part of the stack."""
        return self.testbed.stack.part(self.part)

    def heal_links(self) -> None:
        """Let everything pass again on the links that the fault breaks."""
        for name in self.testbed.links.keys() & {*self.fault.parts}:
            self.testbed.links[name].heal()


def wait_or_not_fired(what: str, condition: Callable[[], T | None], *, timeout_s: float, poll_s: float = 0.05) -> T:
    """Wait as `wait_for` does, for something without which a fault has not happened: NotFired if it does not come.

    Raises Failure once a signal has ended the run.
    """
    try:
        return wait_for(what, condition, timeout_s=timeout_s, poll_s=poll_s, needs=interrupt.require_none)
    except TimeoutError as error:
        raise NotFired(str(error)) from error


def despite_faults(condition: Callable[[], T]) -> Callable[[], T | None]:
    """The condition, which is not yet true while a database or a worker is unavailable: another fault may break it."""

    def look() -> T | None:
        with suppress(Failure, TimeoutError, psycopg2.Error):
            return condition()
        return None

    return look


# Nothing was done, because a server was unavailable. An operator runs the command again.
UNAVAILABLE = {
    *("connect-unavailable", "kafka-unavailable", "topic-silent", "timeout"),
    *("database-unavailable", "database-connection-lost", "database-busy"),
}
AGAIN_S = 1.0
AGAIN_TIMEOUT_S = 300.0


def run(
    testbed: Testbed,
    *words: str,
    expected: Collection[str] = (),
    temporary: Collection[str] = (),
    links: Sequence[str] = (),
) -> Done:
    """Run a command, and again while what it needs is unavailable or it ends with a ``temporary`` code.

    Raises NotFired if it ends unexpectedly.
    """

    def ended() -> Done | None:
        done = testbed.run(*words, links=links)
        return None if done.code in {*UNAVAILABLE, *temporary} else done

    done = wait_or_not_fired(f"what `outbox {' '.join(words)}` needs", ended, timeout_s=AGAIN_TIMEOUT_S, poll_s=AGAIN_S)
    if done.status != 0 and done.code not in expected:
        raise NotFired(f"outbox {' '.join(words)} ended with {done.code or done.status}: {done.end}")
    return done


# The nemesis -------------------------------------------------------------------------------------------------------

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

        def wait_for_room(at_most: int) -> None:
            """Wait until at most so many faults last. Raises what one that has ended raised."""
            nonlocal running
            while len(running) > at_most:
                watch()
                done, running = futures.wait(running, POLL_S, return_when=futures.FIRST_COMPLETED)
                for one in done:
                    one.result()

        with ThreadPoolExecutor(AT_ONCE) as pool:
            try:
                for number, draw in enumerate(draws(self._seed, self._faults, pause_s)):
                    wait_for_room(AT_ONCE - 1 if draw.is_beside else 0)
                    self._wait_until(min(time.monotonic() + draw.pause_s, until_s), watch)
                    if self._is_over(until_s):
                        break
                    watch()  # there may have been neither a wait nor a pause
                    running.add(pool.submit(self._inject, number, draw, began_s, until_s))
                if self._is_ended:
                    self._report(f"no fault begins any more; healing {', '.join(self.lasting) or 'nothing'}")
                wait_for_room(0)
            except BaseException as error:
                self._stopped.set()
                name = type(error).__name__
                self._report(f"no fault begins any more ({name}); waiting for {', '.join(self.lasting) or 'nothing'}")
                raise

    def end(self) -> None:
        """Begin no further fault: `run` returns when all that have begun are healed."""
        self._is_ended = True  # and nothing else: a signal may be what calls this

    def _is_over(self, until_s: float) -> bool:
        return self._is_ended or time.monotonic() >= until_s

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
