"""What a run has left, once everything has settled: read once, kept in files, and judged by the checkers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeVar

from outbox.base.database import Row
from outbox_lab.soak.foreign import Totals, keys_of_totals


@dataclass(frozen=True, slots=True)
class TopicEvent:
    """A valid event on a topic."""

    id: str
    topic: str
    partition: int
    offset: int
    key: str
    type: str  # with its version, as the catalog names it
    version: int | None  # of its key
    data: Mapping[str, Any]
    numbers: Mapping[str, Decimal] = field(default_factory=dict)
    """By property, the numbers that totals add up, of the newest version of the event."""

    @property
    def identity(self) -> str:
        """The id of the change, which each record of it has."""
        return self.id

    @property
    def place(self) -> str:
        """Where it stands."""
        return f"{self.topic}-{self.partition}@{self.offset}"


@dataclass(frozen=True, slots=True)
class RowChange:
    """A change of a row of a captured table, on the topic of the table. It has no id: see ``identity``."""

    topic: str
    partition: int
    offset: int
    table: str
    key: str  # the primary key of the row
    lsn: int  # where it stands in the log; of a row of a snapshot, where the snapshot was taken
    op: str  # r: a row of a snapshot; c, u, d: a row that was inserted, updated, deleted
    row: Mapping[str, Any] = field(default_factory=dict)
    """The row afterwards, by column; empty if it was deleted."""

    @property
    def identity(self) -> str:
        """Table, key, place in the log, and operation, which distinguish changes."""
        return f"{self.table} {self.key} {self.lsn} {self.op}"

    @property
    def place(self) -> str:
        """Where it stands on the topic."""
        return f"{self.topic}-{self.partition}@{self.offset}"


R = TypeVar("R", TopicEvent, RowChange)


@dataclass(frozen=True)
class Copy:
    """A captured table of the source, and what a sink has of it: by the same columns, of which one is the key."""

    sink: str
    topic: str
    key: str
    version: str | None = None  # the column that counts the changes of a row
    source: Sequence[Row] = ()
    rows: Sequence[Row] = ()
    """Of the sink."""


@dataclass(frozen=True)
class Foreign:
    """A foreign event on a topic, with what it adds to comparisons that do not say what an event adds."""

    event: TopicEvent
    totals: Totals = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """A row of idempotency_keys: what the service has promised to answer to a key, in the transaction of the change."""

    key: str
    status: int
    body: Any


@dataclass(frozen=True)
class Source:
    """The source."""

    answers: Sequence[StoredAnswer] = ()
    changes: Mapping[str, int] = field(default_factory=dict)
    """By change, as the domain names it: how many events it must have."""
    outbox: frozenset[str] = frozenset()
    """The ids in the outbox table, which `outbox prune` has left there."""
    violations: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """By invariant of the domain: the rows that violate it."""
    changed_twice: frozenset[str] = frozenset()
    """The changes that are there more than once."""


class Adds(NamedTuple):
    """What an event adds to the total of its key: the number of a property, or 1; or that much less."""

    sign: int = 1
    property: str | None = None


@dataclass(frozen=True)
class ComparedTotals:
    """What one sink has of one comparison of `outbox.audit.comparison_files`, and what it should have."""

    name: str
    totals: Mapping[str, Decimal] = field(default_factory=dict)
    """By key, of the sink."""
    source: Mapping[str, Decimal] = field(default_factory=dict)
    """By key, of the source."""
    adds: Mapping[str, Adds] | None = field(default_factory=dict)
    """By type of event, of those that the sink has asked for; None if its file does not say, or if the sink carries
    states.
    """
    versions: Mapping[str, int] | None = None
    """By key, the highest version that the sink has applied, where it says so."""

    def added_by(self, event: TopicEvent) -> Decimal | None:
        """What an event adds to the total of its key; None if this comparison is not about it."""
        adds = (self.adds or {}).get(event.type)
        if adds is None:
            return None
        return adds.sign * (Decimal(1) if adds.property is None else event.numbers[adds.property])


@dataclass(frozen=True)
class Sink:
    """A sink, and which repeats its strategy recognises (`outbox.sink.remembering.strategy`)."""

    name: str
    repeats: Literal["all", "re-reads", "none"] = "all"
    comparisons: Sequence[ComparedTotals] = ()
    set_aside: frozenset[str] = frozenset()
    """The ids of valid events that are open or discarded dead letters."""
    applied: Mapping[str, int] | None = None
    """By event id, how often the sink has applied it; None if it does not count that."""
    forgotten: frozenset[str] = frozenset()
    """The ids of valid events that its strategy has to remember, and does not."""
    rows: Mapping[str, int] | None = None
    """By event id, how many rows its table of events has; None if its result is no such table."""
    types: frozenset[str] = frozenset()
    """The types of events that it has asked for, as `TopicEvent.type`."""
    knows_ids: bool = True
    """Whether its strategy recognises a repeat by the id of the event, and not by key and version."""
    is_based: bool = False
    """Whether it was rebuilt from the source, which does not have the foreign events of before."""
    foreign_set_aside: Mapping[str, str] = field(default_factory=dict)
    """The foreign events that are open or discarded dead letters: the reason of each, by its place."""

    def times(self, event: TopicEvent) -> Decimal | None:
        """How often an event that is the only one of its key was applied; None if no total says it."""
        for one in self.comparisons:
            number = one.added_by(event)
            if number:
                return one.totals.get(event.key, Decimal(0)) / number
        return None


@dataclass(frozen=True)
class Seen:
    """All of it."""

    events: Sequence[TopicEvent] = ()
    """The valid events of the service on the topics, in the order of offsets within a partition."""
    source: Source = field(default_factory=Source)
    sinks: Sequence[Sink] = ()
    released: int = 0
    """How many hanging transactions `outbox connect apply` has ended; the events of each are on their topics twice."""
    foreign: Sequence[Foreign] = ()
    """The foreign events on the topics."""
    unreadable: Sequence[str] = ()
    """The places of foreign events that are no valid events."""
    row_changes: Sequence[RowChange] = ()
    """The valid changes of captured tables on their topics, in the order of offsets within a partition."""
    released_changes: Mapping[str, int] = field(default_factory=dict)
    """By topic of a captured table, how many hanging transactions of its connector were ended."""
    copies: Sequence[Copy] = ()

    @cached_property
    def firsts(self) -> Mapping[str, TopicEvent]:
        """By id, the first of each event."""
        return _firsts(self.events)

    @cached_property
    def first_changes(self) -> Mapping[str, RowChange]:
        """By identity, the first record of each change of a row."""
        return _firsts(self.row_changes)

    @cached_property
    def foreign_keys(self) -> set[str]:
        """The keys of all totals that foreign events add to."""
        return {key for one in self.foreign for key in keys_of_totals(one.event.key, one.totals)}


def _firsts(records: Sequence[R]) -> dict[str, R]:
    """By identity, the first record of each."""
    found: dict[str, R] = {}
    for record in records:
        found.setdefault(record.identity, record)
    return found
