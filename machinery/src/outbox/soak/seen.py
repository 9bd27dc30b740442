"""What a run has left, once everything has settled: read once, kept in files, and judged by the checkers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cached_property
from typing import Any, Literal


@dataclass(frozen=True)
class Event:
    """A valid event on a topic."""

    id: str
    topic: str
    partition: int
    offset: int
    key: str
    type: str  # with its version, as the catalog names it
    version: int | None  # of its key
    data: Mapping[str, Any]


@dataclass(frozen=True)
class Answer:
    """A row of idempotency_keys: what the service has promised to answer to a key, in the transaction of the change."""

    key: str
    status: int
    body: Any


@dataclass(frozen=True)
class Source:
    """The source."""

    answers: Sequence[Answer] = ()
    changes: Mapping[str, int] = field(default_factory=dict)
    """By change, as the domain names it: how many events it must have."""
    outbox: frozenset[str] = frozenset()
    """The ids in the outbox table, which `outbox prune` has left there."""
    violations: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """By invariant of the domain: the rows that violate it."""


@dataclass(frozen=True)
class Comparison:
    """What one sink has of one comparison of `outbox.audit.comparison_files`, and what it should have."""

    name: str
    totals: Mapping[str, Decimal] = field(default_factory=dict)
    """By key, of the sink."""
    source: Mapping[str, Decimal] = field(default_factory=dict)
    """By key, of the source."""
    adds: Mapping[str, Decimal] | None = field(default_factory=dict)
    """By event id, what the event adds to the total of its key; None if its file does not say, or if the sink carries
    states.
    """


@dataclass(frozen=True)
class Sink:
    """A sink, and which repeats its strategy recognises (`outbox.sink.strategy`)."""

    name: str
    repeats: Literal["all", "re-reads", "none"] = "all"
    comparisons: Sequence[Comparison] = ()
    set_aside: frozenset[str] = frozenset()
    """The ids of valid events with a letter that is not closed."""
    applied: Mapping[str, int] | None = None
    """By event id, how often the sink has applied it, where it counts that."""


@dataclass(frozen=True)
class Seen:
    """All of it."""

    events: Sequence[Event] = ()
    """The valid events on the topics, in the order of offsets within a partition."""
    source: Source = field(default_factory=Source)
    sinks: Sequence[Sink] = ()
    released: int = 0
    """How many hanging transactions `outbox connect apply` has ended; the events of each are on their topics twice."""

    @cached_property
    def firsts(self) -> Mapping[str, Event]:
        """By id, the first of each event."""
        found: dict[str, Event] = {}
        for event in self.events:
            found.setdefault(event.id, event)
        return found
