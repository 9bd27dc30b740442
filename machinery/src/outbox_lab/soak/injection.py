"""What was to break, and what became of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outbox_lab.soak.foreign import ForeignRecord


@dataclass(frozen=True)
class Planned:
    """A fault that was drawn. Times are seconds; ``at_s`` is when it was due, since the faults began."""

    at_s: float
    lasts_s: float
    fault: str


@dataclass(frozen=True)
class Injection:
    """What became of a planned fault."""

    planned: Planned
    evidence: str = ""  # empty if it has not happened
    problem: str = ""
    is_healed: bool = False
    is_broken_off: bool = False  # the run ended before it could be healed, for another reason
    fired_s: float = 0.0
    healed_s: float = 0.0
    parts: tuple[str, ...] = ()  # that it broke
    victims: tuple[str, ...] = ()  # the processes of these parts that it may have ended; none means all
    held: tuple[str, ...] = ()  # that it needed, and only kept from other faults
    foreign: Sequence[ForeignRecord] = ()  # the foreign events that it has sent
    invalid: int = 0  # how many records that are no valid events it has sent

    def __str__(self) -> str:
        return f"{self.planned.fault} at {self.planned.at_s:.0f} s: {self.problem or self.evidence}"
