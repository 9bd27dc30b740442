"""A fault: one way to break the chain, with the evidence that it did."""

from __future__ import annotations

import inspect
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeVar

from outbox.base.wait import wait_for
from outbox_lab.soak.foreign import ForeignRecord
from outbox_lab.soak.testbed import Testbed
from outbox_lab.stack import interrupt

T = TypeVar("T")
A_WHILE_S = (2.0, 10.0)


class NotFired(Exception):
    """A fault has not happened. The message says why."""


class NoChance(Exception):
    """A fault cannot happen as things are now, and has broken nothing. It is left out, as if it had not been drawn."""


class Fault(ABC):
    """One way to break the chain. An object is for one injection."""

    name: str
    """How a schedule calls it."""
    parts: tuple[str, ...]
    """What it breaks. Each may end what depends on it, and no other fault breaks it at the same time."""
    victims: tuple[str, ...] = ()
    """The processes of its parts that it may end; without any, all of them may end. Known once it has begun."""
    needs: tuple[str, ...] = ()
    """What else no other fault may break meanwhile, because this one needs it."""
    lasts_s: tuple[float, float] = (0.0, 0.0)
    """How long it lasts before it is healed: from, to. By default it is healed at once."""
    foreign: Sequence[ForeignRecord] = ()
    """The foreign events that it has sent."""
    invalid: int = 0
    """How many records that are no valid events it has sent, or may have sent."""

    def is_possible(self, _: Testbed) -> bool:
        """Whether it can happen on this chain at all. One that cannot is never drawn."""
        return True

    def prepare(self, testbed: Testbed) -> None:  # noqa: B027 - few faults need it
        """Prepare the testbed for it, before anything of that runs."""

    def draw_duration_s(self, chance: random.Random) -> float:
        """How long this one lasts, drawn before it begins."""
        return chance.uniform(*self.lasts_s)

    @property
    def summary(self) -> str:
        """What it does, in one line; by default the docstring of its class."""
        return " ".join((inspect.getdoc(type(self)) or "").split())

    @abstractmethod
    def fire(self, testbed: Testbed, chance: random.Random) -> str:
        """Break it, and return the evidence. Raises NotFired without any, or NoChance."""

    def heal(self, testbed: Testbed) -> None:  # noqa: B027 - some faults pass by themselves
        """Undo it, and return once the part works again. Also called if `fire` has failed."""


Make = Callable[[], Fault]  # one for each injection


class FaultOfPart(Fault):
    """A fault of one of several parts. Its name begins with the part."""

    what: str
    lasts_s = A_WHILE_S

    def __init__(self, part: str) -> None:
        self.part = part
        self.parts = (part,)
        self.name = f"{part}-{self.what}"


def wait_or_not_fired(what: str, condition: Callable[[], T | None], *, timeout_s: float, poll_s: float = 0.05) -> T:
    """Wait as `wait_for` does, for something without which a fault has not happened: NotFired if it does not come.

    Raises Failure once a signal has ended the run.
    """
    try:
        return wait_for(what, condition, timeout_s=timeout_s, poll_s=poll_s, needs=interrupt.require_none)
    except TimeoutError as error:
        raise NotFired(str(error)) from error
