"""Foreign events: valid, and never in the outbox. A hostile producer sends them, and sinks apply them as any other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Totals = Mapping[str, tuple[str, int]]  # by comparison, the key of a total, and what the event adds to it


def keys_of_totals(key: str, totals: Totals) -> set[str]:
    """The keys of all totals that an event with this key adds to."""
    return {key, *(one for one, _ in totals.values())}


class ForeignEvent(NamedTuple):
    """A valid event of a key that neither the service nor another foreign event has. No event of the service may add to
    one of its totals.
    """

    event: str  # as the catalog names it, in its newest version: order.placed
    key: str
    payload: Mapping[str, Any]
    totals: Totals = {}  # noqa: RUF012 - a NamedTuple
    """By comparison that does not say what an event adds: the key of a total, and what the event adds to it."""


@dataclass(frozen=True)
class ForeignRecord:
    """Where a foreign event stands, and what the domain has said of it."""

    topic: str
    partition: int
    offset: int
    key: str
    totals: Totals = field(default_factory=dict)


def keys(events: Iterable[ForeignEvent]) -> set[str]:
    """The keys of all totals that they add to."""
    return {key for event in events for key in keys_of_totals(event.key, event.totals)}
