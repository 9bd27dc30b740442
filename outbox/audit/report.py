"""What a comparison found, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from outbox.audit.topic_part import EXACT, Malformed, Quantity
from outbox.audit.verified import Verified
from outbox.base.errors import Failure


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong. ``code`` is stable; the wording of the rest may change."""

    code: str
    message: str
    count: int
    first: str = ""  # where to look first
    worst: str = ""  # the largest of them, where they differ in size
    sink: str | None = None

    def __str__(self) -> str:
        where = "; ".join(f"{name}: {text}" for name, text in (("first", self.first), ("worst", self.worst)) if text)
        return self.message + (f" ({where})" if where else "")


@dataclass
class Foreign:
    """Valid events on the topic that never were in the outbox."""

    count: int = 0
    first: str = ""
    worst: str = ""
    largest: Decimal = Decimal(-1)

    def add(self, text: str, quantity: Quantity) -> None:
        """Count an event."""
        self.count += 1
        self.first = min(self.first or text, text)  # the oldest: UUIDv7s sort by time
        size = Decimal(quantity).copy_abs()
        if size > self.largest or (size == self.largest and text < self.worst):
            self.largest, self.worst = size, text


@dataclass
class SinkReport:
    """How a sink compares with the source."""

    name: str
    drift: dict[str, Decimal] = field(default_factory=dict)  # by key, its total minus the source's, where not zero
    in_flight: int = 0  # events that it has not applied yet; of states, versions that it is behind
    lost: int = 0  # events of the outbox that it will not receive
    parked: int = 0  # events that it has set aside
    first_parked: str = ""
    duplicates: int = 0  # duplicates that it has skipped, ever
    uncertain: set[str] = field(default_factory=set)  # keys not compared: an event of theirs breaks the contract
    not_compared: str = ""  # why no total is compared, if so

    @property
    def drift_total(self) -> Decimal:
        """The sum of the absolute drifts: opposite ones do not cancel."""
        total = Decimal(0)
        for difference in self.drift.values():
            total = EXACT.add(total, abs(difference))
        return total

    @property
    def findings(self) -> list[Finding]:
        """What is wrong with this sink."""
        found = []
        if self.drift:
            count = len(self.drift)
            key, difference = max(self.drift.items(), key=lambda entry: abs(entry[1]))
            found.append(
                Finding(
                    "sink-drift",
                    f"sink {self.name} drifts by {number(self.drift_total)} in {plural(count, 'key')}",
                    count,
                    worst=f"{key} {number(difference, sign='+')}",
                    sink=self.name,
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
            "drift": self.drift,
            "drift_total": self.drift_total,
            "in_flight": self.in_flight,
            "lost": self.lost,
            "parked": self.parked,
            "duplicates": self.duplicates,
            "uncertain_keys": len(self.uncertain),
            "not_compared": self.not_compared,
        }


@dataclass
class Report:
    """How source, topic and sinks compare."""

    topic: str
    totals: Mapping[str, Decimal] = field(default_factory=dict)  # by key, as the source has them
    outbox_events: int = 0
    records: int = 0
    verified_before: int = 0  # of them, not read again by an incremental check
    duplicates: int = 0
    repeated: dict[str, Decimal] = field(default_factory=dict)  # by key, the quantity of the duplicates
    malformed: Malformed = field(default_factory=Malformed)
    missing_versions: int = 0
    most_missing: str = ""  # the key that misses most
    lost: list[str] = field(default_factory=list)  # ids of events that the topic has skipped
    in_flight: int = 0  # events of the outbox that are not on the topic yet
    foreign: Foreign = field(default_factory=Foreign)
    pruned: int = 0  # events on the topic that `outbox prune` may have deleted from the outbox
    sinks: list[SinkReport] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what is not compared, and why
    verified: Verified | None = None  # where the next incremental check may begin

    @property
    def findings(self) -> list[Finding]:
        """What is wrong. Duplicates are not: sinks must cope with them."""
        found = []
        if self.records and self.malformed.count == self.records:
            text = f"nothing was compared: no record of topic {self.topic} is a valid event"
            found.append(Finding("nothing-compared", text, self.records))
        if self.malformed.count:
            reasons = ", ".join(f"{reason} {count}" for reason, count in self.malformed.reasons.most_common())
            text = f"{plural(self.malformed.count, 'record')} on the topic violate the contract: {reasons}"
            found.append(Finding("malformed-records", text, self.malformed.count, self.malformed.first))
        if self.lost:
            text = f"{plural(len(self.lost), 'event')} lost: in the outbox, skipped on the topic"
            found.append(Finding("events-lost", text, len(self.lost), self.lost[0]))
        if self.missing_versions > len(self.lost):
            count = self.missing_versions - len(self.lost)
            text = f"{plural(count, 'version')} missing on the topic"
            found.append(Finding("versions-missing", text, count, worst=self.most_missing))
        if self.foreign.count:
            text = f"{plural(self.foreign.count, 'event')} on the topic never in the outbox"
            found.append(Finding("foreign-events", text, self.foreign.count, self.foreign.first, self.foreign.worst))
        return found + [finding for sink in self.sinks for finding in sink.findings]

    @property
    def settled(self) -> bool:
        """Whether nothing is in flight."""
        return self.in_flight == 0 and all(sink.in_flight == 0 for sink in self.sinks)

    def sink(self, name: str) -> SinkReport:
        """The report of one sink. Raises Failure if it never ran."""
        for sink in self.sinks:
            if sink.name == name:
                return sink
        raise Failure(f"sink {name} has never run", f"`outbox sink {name}` runs it", code="sink-never-ran")

    def as_dict(self) -> dict[str, Any]:
        """For JSON. Its keys are stable; numbers may have a fraction."""
        return {
            "topic": self.topic,
            "keys": len(self.totals),
            "outbox_events": self.outbox_events,
            "records": self.records,
            "verified_before": self.verified_before,
            "duplicates": self.duplicates,
            "malformed": {
                "count": self.malformed.count,
                "first": self.malformed.first,
                "reasons": dict(self.malformed.reasons),
            },
            "missing_versions": self.missing_versions,
            "lost": self.lost,
            "in_flight": self.in_flight,
            "foreign": {"count": self.foreign.count, "first": self.foreign.first, "worst": self.foreign.worst},
            "pruned": self.pruned,
            "sinks": [sink.as_dict() for sink in self.sinks],
            "notes": self.notes,
            "settled": self.settled,
            "findings": [vars(finding) for finding in self.findings],
        }


def number(value: Quantity, sign: str = "") -> str:
    """A number in plain digits: no exponent, no zeros at the end."""
    text = f"{value:{sign}f}" if isinstance(value, Decimal) else f"{value:{sign}d}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def plural(count: int, noun: str) -> str:
    """A count with its noun."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
