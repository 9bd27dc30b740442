"""The report of a check, as data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import msgspec

from outbox.audit.quantity import EXACT, text_of
from outbox.audit.rows import ComparedRows
from outbox.audit.sinks import SinkState
from outbox.audit.verified import EventCounts, Verified
from outbox.base.errors import Failure, plural
from outbox.sink.rows import Differences

# Counts of a topic that can be added up.
COUNTS = (
    *("outbox_events", "records", "verified_before", "duplicates", "in_flight", "pruned"),
    *("missing_versions", "repeated_versions", "spread_keys"),
)


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong. ``code`` is stable; the wording of the rest may change."""

    code: str
    message: str
    count: int
    first: str = ""  # where to look first
    worst: str = ""  # the largest of them, where they differ in size
    topic: str | None = None
    sink: str | None = None
    comparison: str | None = None

    def __str__(self) -> str:
        where = "; ".join(f"{name}: {text}" for name, text in (("first", self.first), ("worst", self.worst)) if text)
        return self.message + (f" ({where})" if where else "")


@dataclass(frozen=True)
class Foreign:
    """Valid events on a topic that never were in the outbox."""

    count: int = 0
    first: str = ""  # the oldest: UUIDv7s sort by time
    worst: str = ""  # the one with the largest number


@dataclass(frozen=True)
class Malformed:
    """The records that break the contract. They count in no comparison.

    Those whose dead letter was discarded are acknowledged, and count apart.
    """

    count: int = 0
    first: str = ""  # place and reason
    reasons: Counter[str] = field(default_factory=Counter)
    acknowledged: int = 0


@dataclass
class TopicReport:
    """How a topic compares with the outbox."""

    name: str
    outbox_events: int = 0
    records: int = 0
    verified_before: int = 0  # of them, not read again by an incremental check
    events: dict[str, EventCounts] = field(default_factory=dict)  # by name
    malformed: Malformed = field(default_factory=Malformed)
    missing_versions: int = 0
    most_missing: str = ""  # the key that misses most
    repeated_versions: int = 0  # versions of a key that different events have
    first_repeated: str = ""
    spread_keys: int = 0  # keys whose events are on several partitions
    first_spread: str = ""
    lost: list[str] = field(default_factory=list)  # ids of events that the topic has skipped
    foreign: Foreign = field(default_factory=Foreign)

    @property
    def duplicates(self) -> int:
        """The number of records that repeat an event."""
        return sum(counts.duplicates for counts in self.events.values())

    @property
    def in_flight(self) -> int:
        """The number of events of the outbox that are not on the topic yet."""
        return sum(counts.in_flight for counts in self.events.values())

    @property
    def pruned(self) -> int:
        """The number of events that `outbox prune` may have deleted from the outbox."""
        return sum(counts.pruned for counts in self.events.values())

    @property
    def findings(self) -> list[Finding]:
        """The problems of the topic. A duplicate is no problem: sinks must cope with it."""
        return [
            Finding(code, f"topic {self.name}: {text}", count, first, worst, topic=self.name)
            for code, text, count, first, worst in self._problems()
            if count
        ]

    def _problems(self) -> list[tuple[str, str, int, str, str]]:
        malformed, foreign = self.malformed, self.foreign
        reasons = ", ".join(f"{reason} {count}" for reason, count in malformed.reasons.most_common())
        missing = max(0, self.missing_versions - len(self.lost))
        nothing = self.records if malformed.count == self.records else 0
        broken = f"{plural(malformed.count, 'record')} outside the contract: {reasons}"
        lost = f"{plural(len(self.lost), 'event')} lost: in the outbox, skipped on the topic"
        repeated = f"{plural(self.repeated_versions, 'version')} of a key on different events"
        spread = f"{plural(self.spread_keys, 'key')} with events on several partitions, which have no common order"
        return [
            ("nothing-compared", "nothing was compared: no record is a valid event", nothing, "", ""),
            ("malformed-records", broken, malformed.count, malformed.first, ""),
            ("events-lost", lost, len(self.lost), self.lost[0] if self.lost else "", ""),
            ("versions-missing", f"{plural(missing, 'version')} missing", missing, "", self.most_missing),
            ("versions-repeated", repeated, self.repeated_versions, self.first_repeated, ""),
            ("keys-spread", spread, self.spread_keys, self.first_spread, ""),
            (
                "foreign-events",
                f"{plural(foreign.count, 'event')} never in the outbox",
                foreign.count,
                foreign.first,
                foreign.worst,
            ),
        ]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            **_picked(self, "name", *COUNTS, "lost"),
            "malformed": _picked(self.malformed, "count", "first", "reasons", "acknowledged"),
            "foreign": _picked(self.foreign, "count", "first", "worst"),
            "events": {name: msgspec.structs.asdict(counts) for name, counts in self.events.items()},
        }


@dataclass
class ComparisonReport:
    """How the totals or rows of a sink compare with those of the source, by one comparison."""

    name: str
    totals: Mapping[str, Decimal] = field(default_factory=dict)  # by key, those of the source
    drift: dict[str, Decimal] = field(default_factory=dict)  # by key, the sink's total minus what is due, if not zero
    repeated: dict[str, Decimal] = field(default_factory=dict)  # by key, what the duplicates on the topics would add
    # Keys not compared: nobody knows what an event of theirs adds, or changes.
    uncertain: set[str] = field(default_factory=set)
    not_compared: str = ""  # why nothing is compared, if so
    rows: int | None = None  # of the source; None if totals are compared
    differences: Differences = field(default_factory=Differences)  # of rows

    @classmethod
    def of(cls, rows: ComparedRows) -> ComparisonReport:
        """The report of a comparison that nobody has made yet."""
        if rows.comparison.columns:
            return cls(rows.comparison.name, rows=rows.count())
        return cls(rows.comparison.name, rows.totals())

    @property
    def keys(self) -> int:
        """How many keys the source has."""
        return len(self.totals) if self.rows is None else self.rows

    @property
    def drift_total(self) -> Decimal:
        """The sum of the absolute drifts: opposite ones do not cancel."""
        return sum_of_sizes(self.drift.values())

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            **_picked(self, "name", "keys", "drift", "drift_total", "not_compared"),
            "uncertain_keys": len(self.uncertain),
            "differing_keys": len(self.drift) or self.differences.count,
            "differences": [one.as_dict() for one in self.differences.worst],
        }


@dataclass
class SinkReport:
    """How a sink compares with the source."""

    name: str
    comparisons: list[ComparisonReport] = field(default_factory=list)
    in_flight: int = 0  # events that it has not applied yet; of states, versions that it is behind
    lost: int = 0  # events of the outbox that it will not receive
    parked: int = 0  # events that it has set aside
    first_parked: str = ""
    discarded: Mapping[str, int] = field(default_factory=dict)  # by reason, how many dead letters
    duplicates: int = 0  # duplicates that it has skipped, ever
    filtered: int = 0  # events that its transform has left out, ever
    not_compared: str = ""  # why none of its totals is compared, if so

    @classmethod
    def of(cls, state: SinkState, comparisons: Sequence[ComparisonReport] = ()) -> SinkReport:
        """The report of a sink of which nothing was compared yet."""
        return cls(
            state.name,
            list(comparisons),
            discarded=state.discarded,
            duplicates=state.duplicates,
            filtered=state.filtered,
            not_compared=state.not_compared,
        )

    @property
    def drift(self) -> dict[str, Decimal]:
        """By key, the drifts of all comparisons added up."""
        found: dict[str, Decimal] = {}
        for one in self.comparisons:
            for key, number in one.drift.items():
                found[key] = EXACT.add(found.get(key, Decimal(0)), number)
        return found

    @property
    def drift_total(self) -> Decimal:
        """The sum of the absolute drifts of all comparisons."""
        return sum_of_sizes(one.drift_total for one in self.comparisons)

    def comparison(self, name: str) -> ComparisonReport:
        """The comparison with this name."""
        [found] = (one for one in self.comparisons if one.name == name)
        return found

    @property
    def findings(self) -> list[Finding]:
        """The problems of this sink."""
        found = []
        for one in self.comparisons:
            where = {"sink": self.name, "comparison": one.name}
            if one.drift:
                drift, keys = text_of(one.drift_total), plural(len(one.drift), "key")
                key, difference = max(one.drift.items(), key=lambda entry: abs(entry[1]))
                text, worst = f"{one.name} drifts by {drift} in {keys}", f"{key} {text_of(difference, sign='+')}"
                found.append(Finding("sink-drift", f"sink {self.name}: {text}", len(one.drift), worst=worst, **where))
            if one.differences.count:
                count, worst = one.differences.count, one.differences.worst[0].summary
                text = f"{one.name} differs in {plural(count, 'key')}"
                found.append(Finding("rows-differ", f"sink {self.name}: {text}", count, worst=worst, **where))
        if self.parked:
            text = f"sink {self.name} has set {plural(self.parked, 'event')} aside"
            found.append(Finding("sink-parked", text, self.parked, self.first_parked, sink=self.name))
        return found

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            **_picked(self, "name", "in_flight", "lost", "parked", "duplicates", "filtered", "not_compared"),
            "comparisons": [one.as_dict() for one in self.comparisons],
        }


class _Sum:
    """A number of a report: that of its topics added up."""

    def __set_name__(self, _: type[Report], name: str) -> None:
        self._name = name

    def __get__(self, report: Report, _: type[Report]) -> int:
        return sum(getattr(topic, self._name) for topic in report.topics)


@dataclass
class Report:
    """How source, topics and sinks compare."""

    topics: list[TopicReport] = field(default_factory=list)
    sinks: list[SinkReport] = field(default_factory=list)
    uncompared_tables: list[str] = field(default_factory=list)  # of sinks, and no comparison reads them
    notes: list[str] = field(default_factory=list)  # what is not compared, and why
    verified: Verified | None = None  # where the next incremental check may begin

    outbox_events = _Sum()
    records = _Sum()
    verified_before = _Sum()
    duplicates = _Sum()
    missing_versions = _Sum()
    in_flight = _Sum()
    pruned = _Sum()

    @property
    def findings(self) -> list[Finding]:
        """All problems, those of topics first."""
        of_topics = [finding for topic in self.topics for finding in topic.findings]
        return of_topics + [finding for sink in self.sinks for finding in sink.findings]

    @property
    def settled(self) -> bool:
        """Whether nothing is in flight."""
        return self.in_flight == 0 and all(sink.in_flight == 0 for sink in self.sinks)

    @property
    def in_flight_text(self) -> str:
        """Where events are in flight: by topic how many it lacks, by sink how many it has not applied."""
        topics = [f"topic {one.name} lacks {plural(one.in_flight, 'event')}" for one in self.topics if one.in_flight]
        sinks = [f"sink {one.name} is {plural(one.in_flight, 'event')} behind" for one in self.sinks if one.in_flight]
        return ", ".join([*topics, *sinks]) or "nothing"

    @property
    def lost(self) -> list[str]:
        """Ids of events that the topics have skipped."""
        return [event_id for topic in self.topics for event_id in topic.lost]

    @property
    def acknowledged(self) -> list[dict[str, Any]]:
        """Dead letters that an operator has discarded: by sink how many, and by reason."""
        return [
            {"sink": sink.name, "count": sum(sink.discarded.values()), "reasons": dict(sink.discarded)}
            for sink in self.sinks
            if sink.discarded
        ]

    def topic(self, name: str) -> TopicReport:
        """The report of a declared topic."""
        [found] = (one for one in self.topics if one.name == name)
        return found

    def sink(self, name: str) -> SinkReport:
        """The report of one sink. Raises Failure if it never ran."""
        for one in self.sinks:
            if one.name == name:
                return one
        raise Failure(f"sink {name} has never run", f"`outbox sink {name}` runs it", code="sink-never-ran")

    def as_dict(self) -> dict[str, Any]:
        """For JSON. Its keys are stable; numbers may have a fraction."""
        return {
            "topics": [topic.as_dict() for topic in self.topics],
            "total": {name: sum(getattr(topic, name) for topic in self.topics) for name in COUNTS},
            "sinks": [sink.as_dict() for sink in self.sinks],
            **_picked(self, "uncompared_tables", "acknowledged", "notes", "settled"),
            "findings": [vars(finding) for finding in self.findings],
        }


def sum_of_sizes(numbers: Iterable[Decimal]) -> Decimal:
    """The exact sum of absolute numbers."""
    total = Decimal(0)
    for one in numbers:
        total = EXACT.add(total, one.copy_abs())
    return total


def _picked(part: object, *names: str) -> dict[str, Any]:
    return {name: getattr(part, name) for name in names}
