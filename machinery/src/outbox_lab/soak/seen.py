"""Observations of a run: faults, ends of processes and checks while it ran; source, topics and sinks after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cached_property
from typing import Any, Literal, TypeVar

from outbox.base.database import Row
from outbox.sink.comparison_files import AddsLine

Position = tuple[str, int, int]  # topic, partition, offset


# While it ran ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Injection:
    """A fault that was injected. Times are seconds since the faults began."""

    fault: str
    evidence: str = ""  # empty if it has not happened
    problem: str = ""
    is_healed: bool = False
    is_broken_off: bool = False  # the run ended before it could be healed, for another reason
    fired_s: float = 0.0
    healed_s: float = 0.0
    parts: tuple[str, ...] = ()  # that it broke
    victims: tuple[str, ...] = ()  # the processes of these parts that it may have ended; none means all
    invalid: int = 0  # how many invalid records it has sent

    def __str__(self) -> str:
        return f"{self.fault} at {self.fired_s:.0f} s: {self.problem or self.evidence}"


@dataclass(frozen=True)
class Death:
    """A process that has ended, or a connector whose task has failed. Times are seconds since the faults began."""

    process: str
    at_s: float  # when that was seen
    last_line: str = ""  # of its log
    # When it was last seen alive, which may be long before: nobody looks at connectors while a fault breaks Connect.
    alive_s: float | None = None

    @property
    def part(self) -> str:
        """The part of the testbed that the process belongs to: `sinks` of `sinks-1`."""
        name, _, number = self.process.rpartition("-")
        return name if number.isdigit() else self.process


WRONG_RESULT = {"sink-drift", "rows-differ"}  # findings of a sink's comparisons


@dataclass(frozen=True)
class Problem:
    """A finding of `outbox check`."""

    code: str
    message: str
    sink: str | None = None


@dataclass(frozen=True)
class Checked:
    """One result of `outbox check`. It is sound beside writers, and beside sinks that run or do not.

    A rebuild or a rewind erases a loss of its sink, so there is a check before.
    """

    when: str
    duplicates: int = 0  # on the topics
    problems: Sequence[Problem] = ()
    in_flight: str = ""  # at the end: where events still were when the run gave up; empty before
    malformed: int = 0  # records on the topics that break the contract


def checked(when: str, report: Mapping[str, Any], in_flight: str = "") -> Checked:
    """The result in a report, as JSON has it."""
    problems = [Problem(one["code"], one["message"], one["sink"]) for one in report["findings"]]
    malformed = sum(one["malformed"]["count"] + one["malformed"]["acknowledged"] for one in report["topics"])
    return Checked(when, report["total"]["duplicates"], problems, in_flight, malformed)


# On the topics -----------------------------------------------------------------------------------------------------


class _OnTopic:
    """A record with its position on a topic."""

    __slots__ = ()
    topic: str
    partition: int
    offset: int

    @property
    def position(self) -> Position:
        return self.topic, self.partition, self.offset

    @property
    def place(self) -> str:
        """The position, as text."""
        return f"{self.topic}-{self.partition}@{self.offset}"


@dataclass(frozen=True, slots=True)
class TopicEvent(_OnTopic):
    """A valid event on a topic."""

    id: str
    topic: str
    partition: int
    offset: int
    key: str
    type: str  # with its version, as the catalog names it
    version: int | None  # of its key
    data: Mapping[str, Any]
    # By property, the numbers that totals add up, of the newest version of the event.
    numbers: Mapping[str, Decimal] = field(default_factory=dict)

    @property
    def identity(self) -> str:
        """The id of the event, which each record of it has."""
        return self.id

    @property
    def rank(self) -> int:
        """The place of the event among those of its key."""
        return self.offset if self.version is None else self.version


@dataclass(frozen=True, slots=True)
class RowChange(_OnTopic):
    """A change of a row of a captured table, on the topic of the table. It has no id: see ``identity``."""

    topic: str
    partition: int
    offset: int
    table: str
    key: str  # the primary key of the row
    lsn: int  # where it stands in the log; of a row of a snapshot, where the snapshot was taken
    op: str  # r: a row of a snapshot; c, u, d: a row that was inserted, updated, deleted
    row: Mapping[str, Any] = field(default_factory=dict)  # afterwards, by column; empty if it was deleted

    @property
    def identity(self) -> str:
        """Table, key, place in the log, and operation, which distinguish changes."""
        return f"{self.table} {self.key} {self.lsn} {self.op}"


R = TypeVar("R", TopicEvent, RowChange)


# In the databases --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """A row of idempotency_keys: what the service has promised to answer to a key, in the transaction of the change."""

    key: str
    status: int
    body: Any


@dataclass(frozen=True)
class Source:
    """The source database."""

    answers: Sequence[StoredAnswer] = ()
    changes: Mapping[str, int] = field(default_factory=dict)  # by name, how many events each must have
    outbox: frozenset[str] = frozenset()  # the ids in the outbox table, which `outbox prune` has left there
    violations: Mapping[str, Sequence[str]] = field(default_factory=dict)  # by invariant, the rows that violate it
    changed_twice: frozenset[str] = frozenset()  # the changes that are there more than once


@dataclass(frozen=True)
class Copy:
    """A captured table of the source, and what a sink has of it: by the same columns, of which one is the key."""

    sink: str
    topic: str
    key: str
    version: str | None = None  # the column that counts the changes of a row
    source: Sequence[Row] = ()
    rows: Sequence[Row] = ()  # of the sink


@dataclass(frozen=True)
class ComparedTotals:
    """The totals that one sink has for a comparison (`outbox.sink.comparison_files`), and those it should have."""

    name: str
    totals: Mapping[str, Decimal] = field(default_factory=dict)  # by key, of the sink
    source: Mapping[str, Decimal] = field(default_factory=dict)  # by key
    # By type, of the events that the sink asks for; None if its file does not say, or if the sink carries states.
    adds: Mapping[str, AddsLine] | None = field(default_factory=dict)
    versions: Mapping[str, int] | None = None  # by key, the highest that the sink has applied, where it says so

    def added_by(self, event: TopicEvent) -> Decimal | None:
        """The number that an event adds to the total of its key; None if this comparison is not about it."""
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
    set_aside: frozenset[str] = frozenset()  # the ids of valid events that are open or discarded dead letters
    applied: Mapping[str, int] | None = None  # by event id, how often; None if it does not count that
    forgotten: frozenset[str] = frozenset()  # the ids that its strategy has to remember, and does not
    rows: Mapping[str, int] | None = None  # by event id, how many its table of events has; None without such a table
    effects: Mapping[str, Sequence[str]] | None = None  # by key, the ids of events in the order of their effects
    types: frozenset[str] = frozenset()  # of the events that each must have an effect


@dataclass(frozen=True)
class Seen:
    """The state that a run leaves once everything has settled: read once, kept in files, judged by the checkers."""

    events: Sequence[TopicEvent] = ()  # the valid ones, in the order of offsets within a partition
    source: Source = field(default_factory=Source)
    sinks: Sequence[Sink] = ()
    # By topic, how many hanging transactions of its connector were ended; the records of each are there twice.
    released: Mapping[str, int] = field(default_factory=dict)
    row_changes: Sequence[RowChange] = ()  # the valid ones on the topics, in the same order
    copies: Sequence[Copy] = ()

    @cached_property
    def firsts(self) -> Mapping[str, TopicEvent]:
        """By id, the first record of each event."""
        return _firsts(self.events)

    @cached_property
    def first_changes(self) -> Mapping[str, RowChange]:
        """By identity, the first record of each change of a row."""
        return _firsts(self.row_changes)


def _firsts(records: Sequence[R]) -> dict[str, R]:
    found: dict[str, R] = {}
    for record in records:
        found.setdefault(record.identity, record)
    return found
