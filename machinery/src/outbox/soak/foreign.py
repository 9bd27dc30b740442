"""Foreign events: valid, and never in the outbox. A hostile producer sends them, and sinks apply them as any other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class ForeignEvent(NamedTuple):
    """A valid event of a key that neither the service nor another foreign event has."""

    event: str  # as the catalog names it, in its newest version: order.placed
    key: str
    payload: Mapping[str, Any]
    totals: Mapping[str, tuple[str, int]] = {}
    """By comparison that does not say what an event adds: the key of a total, and what the event adds to it."""

    @property
    def keys(self) -> set[str]:
        """The keys of all totals that it adds to. No event of the service may do so."""
        return {self.key, *(key for key, _ in self.totals.values())}


@dataclass(frozen=True)
class ForeignRecord:
    """Where a foreign event stands, and what the domain has said of it."""

    topic: str
    partition: int
    offset: int
    key: str
    totals: Mapping[str, tuple[str, int]] = field(default_factory=dict)


def keys(events: Iterable[ForeignEvent]) -> set[str]:
    """The keys of all totals that they add to."""
    return {key for event in events for key in event.keys}
