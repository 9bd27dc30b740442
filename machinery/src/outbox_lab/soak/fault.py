"""A fault: one way to break the chain, with the evidence that it did."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

import psycopg2

from outbox.base.errors import Failure
from outbox.base.wait import wait_for
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
