"""What a check found, as data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from outbox.audit.quantity import EXACT, Quantity, text_of
from outbox.audit.topic_part import Refused
from outbox.audit.verified import Verified
from outbox.base.errors import Failure, plural


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


@dataclass
class Foreign:
    """Valid events on a topic that never were in the outbox."""

    count: int = 0
    first: str = ""
    worst: str = ""
    largest: Decimal = Decimal(-1)

    def add(self, text: str, numbers: Sequence[Quantity]) -> None:
        """Count an event."""
        self.count += 1
        self.first = min(self.first or text, text)  # the oldest: UUIDv7s sort by time
        size = max((Decimal(number).copy_abs() for number in numbers), default=Decimal(0))
        if size > self.largest or (size == self.largest and text < self.worst):
            self.largest, self.worst = size, text


@dataclass
class Malformed:
    """The records that break the contract. They count in no comparison.

    Those whose dead letter was discarded are acknowledged, and count apart.
    """

    count: int = 0
    first: str = ""  # place and reason
    reasons: Counter[str] = field(default_factory=Counter)
    acknowledged: int = 0
    _first_place: tuple[int, int] = (0, 0)

    def add(self, one: Refused) -> None:
        """Count a record."""
        self.count += 1
        self.reasons[one.reason] += 1
        if not self.first or one.place < self._first_place:
            self.first, self._first_place = f"{one.place}: {one.detail}", one.place


@dataclass
class EventCounts:
    """What became of one event, in all its versions."""

    delivered: int = 0  # on the topic, duplicates too
    duplicates: int = 0
    in_flight: int = 0  # in the outbox and not on the topic yet
    lost: int = 0  # in the outbox, and the topic has skipped it
    foreign: int = 0  # on the topic, and never in the outbox
    pruned: int = 0  # on the topic, and `outbox prune` may have deleted it from the outbox


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
        """How many records repeat an event."""
        return sum(counts.duplicates for counts in self.events.values())

    @property
    def in_flight(self) -> int:
        """How many events of the outbox are not on the topic yet."""
        return sum(counts.in_flight for counts in self.events.values())

    @property
    def pruned(self) -> int:
        """How many events `outbox prune` may have deleted from the outbox."""
        return sum(counts.pruned for counts in self.events.values())

    @property
    def findings(self) -> list[Finding]:
        """What is wrong. Duplicates are not: sinks must cope with them."""
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
            "name": self.name,
            **self.counts(),
            "lost": self.lost,
            "malformed": {
                "count": self.malformed.count,
                "first": self.malformed.first,
                "reasons": dict(self.malformed.reasons),
                "acknowledged": self.malformed.acknowledged,
            },
            "foreign": {"count": self.foreign.count, "first": self.foreign.first, "worst": self.foreign.worst},
            "events": {name: vars(counts) for name, counts in self.events.items()},
        }

    def counts(self) -> dict[str, int]:
        """What can be added up over topics."""
        return {
            "outbox_events": self.outbox_events,
            "records": self.records,
            "verified_before": self.verified_before,
            "duplicates": self.duplicates,
            "in_flight": self.in_flight,
            "pruned": self.pruned,
            "missing_versions": self.missing_versions,
            "repeated_versions": self.repeated_versions,
            "spread_keys": self.spread_keys,
        }


@dataclass
class ComparisonReport:
    """How the totals of a sink compare with those of the source, by one comparison."""

    name: str
    totals: Mapping[str, Decimal] = field(default_factory=dict)  # by key, those of the source
    drift: dict[str, Decimal] = field(default_factory=dict)  # by key, the sink's total minus what is due, if not zero
    repeated: dict[str, Decimal] = field(default_factory=dict)  # by key, what the duplicates on the topics would add
    uncertain: set[str] = field(default_factory=set)  # keys not compared: nobody knows what an event of theirs adds
    not_compared: str = ""  # why no total is compared, if so

    @property
    def drift_total(self) -> Decimal:
        """The sum of the absolute drifts: opposite ones do not cancel."""
        return sum_of_sizes(self.drift.values())

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "name": self.name,
            "keys": len(self.totals),
            "drift": self.drift,
            "drift_total": self.drift_total,
            "uncertain_keys": len(self.uncertain),
            "not_compared": self.not_compared,
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
        """One of the comparisons. Raises Failure if no comparison has this name."""
        for one in self.comparisons:
            if one.name == name:
                return one
        raise Failure(f"sink {self.name} has no comparison {name}", "correct the name", code="comparison-unknown")

    @property
    def findings(self) -> list[Finding]:
        """What is wrong with this sink."""
        found = []
        for one in self.comparisons:
            if one.drift:
                key, difference = max(one.drift.items(), key=lambda entry: abs(entry[1]))
                found.append(
                    Finding(
                        "sink-drift",
                        f"sink {self.name}: {one.name} drifts by {text_of(one.drift_total)} in"
                        f" {plural(len(one.drift), 'key')}",
                        len(one.drift),
                        worst=f"{key} {text_of(difference, sign='+')}",
                        sink=self.name,
                        comparison=one.name,
                    )
                )
        if self.parked:
            text = f"sink {self.name} has set {plural(self.parked, 'event')} aside"
            found.append(Finding("sink-parked", text, self.parked, self.first_parked, sink=self.name))
        return found

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "name": self.name,
            "in_flight": self.in_flight,
            "lost": self.lost,
            "parked": self.parked,
            "duplicates": self.duplicates,
            "filtered": self.filtered,
            "comparisons": [one.as_dict() for one in self.comparisons],
            "not_compared": self.not_compared,
        }


@dataclass
class Report:
    """How source, topics and sinks compare."""

    topics: list[TopicReport] = field(default_factory=list)
    sinks: list[SinkReport] = field(default_factory=list)
    uncompared_tables: list[str] = field(default_factory=list)  # of sinks, and no comparison reads them
    notes: list[str] = field(default_factory=list)  # what is not compared, and why
    verified: Verified | None = None  # where the next incremental check may begin

    @property
    def findings(self) -> list[Finding]:
        """What is wrong."""
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
    def outbox_events(self) -> int:
        """How many events the outbox has."""
        return sum(topic.outbox_events for topic in self.topics)

    @property
    def records(self) -> int:
        """How many records the topics have."""
        return sum(topic.records for topic in self.topics)

    @property
    def verified_before(self) -> int:
        """How many of them were not read again by an incremental check."""
        return sum(topic.verified_before for topic in self.topics)

    @property
    def duplicates(self) -> int:
        """How many records repeat an event."""
        return sum(topic.duplicates for topic in self.topics)

    @property
    def missing_versions(self) -> int:
        """How many versions are missing on the topics."""
        return sum(topic.missing_versions for topic in self.topics)

    @property
    def lost(self) -> list[str]:
        """Ids of events that the topics have skipped."""
        return [event_id for topic in self.topics for event_id in topic.lost]

    @property
    def in_flight(self) -> int:
        """How many events of the outbox are not on their topic yet."""
        return sum(topic.in_flight for topic in self.topics)

    @property
    def pruned(self) -> int:
        """How many events on the topics `outbox prune` may have deleted from the outbox."""
        return sum(topic.pruned for topic in self.topics)

    @property
    def acknowledged(self) -> list[dict[str, Any]]:
        """What an operator has discarded: by sink how many dead letters, and by reason."""
        return [
            {"sink": sink.name, "count": sum(sink.discarded.values()), "reasons": dict(sink.discarded)}
            for sink in self.sinks
            if sink.discarded
        ]

    def topic(self, name: str) -> TopicReport:
        """The report of one topic. Raises Failure if it is not declared."""
        for topic in self.topics:
            if topic.name == name:
                return topic
        raise Failure(f"topic {name} is not declared", "`outbox events` lists topics", code="topic-unknown")

    def sink(self, name: str) -> SinkReport:
        """The report of one sink. Raises Failure if it never ran."""
        for sink in self.sinks:
            if sink.name == name:
                return sink
        raise Failure(f"sink {name} has never run", f"`outbox sink {name}` runs it", code="sink-never-ran")

    def as_dict(self) -> dict[str, Any]:
        """For JSON. Its keys are stable; numbers may have a fraction."""
        total: Counter[str] = Counter()
        for topic in self.topics:
            total.update(topic.counts())
        return {
            "topics": [topic.as_dict() for topic in self.topics],
            "total": dict(total),
            "sinks": [sink.as_dict() for sink in self.sinks],
            "uncompared_tables": self.uncompared_tables,
            "acknowledged": self.acknowledged,
            "notes": self.notes,
            "settled": self.settled,
            "findings": [vars(finding) for finding in self.findings],
        }


def sum_of_sizes(numbers: Iterable[Decimal]) -> Decimal:
    """The exact sum of absolute numbers."""
    total = Decimal(0)
    for one in numbers:
        total = EXACT.add(total, one.copy_abs())
    return total
