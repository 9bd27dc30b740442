"""The history of a run: what clients and faults did, what was noted while it ran, and what was left after it."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from decimal import Decimal
from functools import cached_property
from http import HTTPStatus
from pathlib import Path
from typing import Any, Literal

from outbox.sink.comparison_files import AddsLine

Position = tuple[str, int, int]  # topic, partition, offset
Outcome = Literal["ok", "failed", "unknown"]
SET_UP = -1  # the client that creates what the others use


# Requests ----------------------------------------------------------------------------------------------------------

# One line of JSON an attempt, written when it ends. A client without an answer may repeat its request with the same
# Idempotency-Key: that is another attempt of the same operation.


@dataclass(frozen=True, slots=True)
class Attempt:
    """A request of a client, sent once. Times are seconds since the run began."""

    client: int
    kind: str
    method: str
    path: str
    key: str | None  # its Idempotency-Key; None for a read, and for a request that is sent without one
    body: Any
    sent_s: float
    ended_s: float
    status: int | None = None  # None without an answer
    answer: Any = None  # the JSON of the answer; None if it is not JSON
    expected: Sequence[int] = ()  # the statuses that the domain lets the service answer; empty if it does not say

    @property
    def outcome(self) -> Outcome:
        """``ok`` and ``failed`` are definite. The service answers 5xx when it does not know, as on a broken commit."""
        if self.status is None or self.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            return "unknown"
        return "ok" if self.status < HTTPStatus.BAD_REQUEST else "failed"

    @property
    def request(self) -> tuple[str, str, Any]:
        """The request, which is the same in all attempts of an operation."""
        return self.method, self.path, self.body


@dataclass(frozen=True)
class Operation:
    """All attempts with one key and one request, in the order in which they ended."""

    key: str
    attempts: tuple[Attempt, ...]

    @property
    def outcome(self) -> Outcome:
        """The outcome of its first definite attempt; ``unknown`` without any."""
        return next((one.outcome for one in self.attempts if one.outcome != "unknown"), "unknown")

    @property
    def answers(self) -> list[tuple[int, Any]]:
        """The definite answers of the operation, each once."""
        found: list[tuple[int, Any]] = []
        for one in self.attempts:
            if one.status is not None and one.outcome != "unknown" and (one.status, one.answer) not in found:
                found.append((one.status, one.answer))
        return found

    @property
    def acknowledged_s(self) -> float | None:
        """When a client was first told that the change is made; None if nobody was."""
        return next((one.ended_s for one in self.attempts if one.outcome == "ok"), None)


@dataclass(frozen=True)
class History:
    """The attempts of a run."""

    attempts: tuple[Attempt, ...] = ()

    @cached_property
    def operations(self) -> Mapping[str, Operation]:
        """By key, the changes that clients asked for. An attempt that uses a key again is in `misuses`."""
        return {key: Operation(key, tuple(attempts)) for key, attempts in self._by_key[0].items()}

    @cached_property
    def misuses(self) -> list[Attempt]:
        """The attempts with a key that another request had before. The service must refuse them."""
        return self._by_key[1]

    @cached_property
    def _by_key(self) -> tuple[dict[str, list[Attempt]], list[Attempt]]:
        by_key: dict[str, list[Attempt]] = {}
        misuses: list[Attempt] = []
        for one in self.attempts:
            if one.key is not None:
                earlier = by_key.setdefault(one.key, [])
                is_same = not earlier or earlier[0].request == one.request
                (earlier if is_same else misuses).append(one)
        return by_key, misuses

    @property
    def reads(self) -> Iterator[Attempt]:
        """The reads with a definite answer, also those that the service has refused, for example with 404."""
        return (one for one in self.attempts if one.method == "GET" and one.outcome != "unknown")


class Recorder:
    """Writes a history while it happens. Several threads may use it."""

    def __init__(self, file: Path) -> None:
        self._file = file.open("a", encoding="utf-8")
        self._lock = threading.Lock()
        self.outcomes: Counter[Outcome] = Counter()  # of the attempts so far
        self.acknowledged = 0
        """How many of them were changes that the service has acknowledged."""

    def add(self, attempt: Attempt) -> None:
        """Write an attempt, in the order in which they end."""
        line = json.dumps(asdict(attempt))
        with self._lock:
            self._file.write(line + "\n")
            self.outcomes[attempt.outcome] += 1
            self.acknowledged += attempt.key is not None and attempt.outcome == "ok"

    def close(self) -> None:
        """End the history."""
        self._file.close()


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
    malformed = sum(sum(one["malformed"].values()) + one["acknowledged"] for one in report["topics"])
    return Checked(when, report["total"]["duplicates"], problems, in_flight, malformed)


# On the topics -----------------------------------------------------------------------------------------------------


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
    # By property, the numbers that totals add up, of the newest version of the event.
    numbers: Mapping[str, Decimal] = field(default_factory=dict)

    @property
    def position(self) -> Position:
        return self.topic, self.partition, self.offset

    @property
    def place(self) -> str:
        """The position, as text."""
        return f"{self.topic}-{self.partition}@{self.offset}"

    @property
    def rank(self) -> int:
        """The place of the event among those of its key."""
        return self.offset if self.version is None else self.version


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

    @cached_property
    def firsts(self) -> Mapping[str, TopicEvent]:
        """By id, the first record of each event."""
        found: dict[str, TopicEvent] = {}
        for event in self.events:
            found.setdefault(event.id, event)
        return found
