"""The report of a check: as data, as JSON for a script, and as text for a person."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import msgspec

from outbox.audit.declared import EXACT, text_of
from outbox.audit.rows import ComparedRows
from outbox.audit.sinks import SinkState
from outbox.audit.verified import Verified
from outbox.base.errors import Failure, plural
from outbox.sink.rows import Differences

REASONS_SHOWN = WORST_SHOWN = 5
# Counts of a topic that can be added up.
COUNTS = ("outbox_events", "records", "acknowledged", "duplicates", "in_flight", "pruned")
# By code, in the order of a report: what is counted of a topic, and what is wrong with it.
PROBLEMS = {
    "nothing-compared": ("record", "and none is a valid event: nothing was compared"),
    "malformed-records": ("record", "outside the contract"),
    "events-lost": ("event", "lost: in the outbox, skipped on the topic"),
    "versions-missing": ("version", "missing"),
    "versions-repeated": ("version", "of a key on different events"),
    "keys-spread": ("key", "with events on several partitions, which have no common order"),
    "foreign-events": ("event", "never in the outbox"),
}


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
class TopicReport:
    """How a topic compares with the outbox, as far as both were read. A duplicate is no problem: sinks must cope with
    it.
    """

    name: str
    outbox_events: int = 0
    records: int = 0
    repeated: Counter[str] = field(default_factory=Counter)  # by name of the event, records that repeat one
    in_flight: int = 0  # events of the outbox that are not on the topic yet
    pruned: int = 0  # events on the topic that `outbox prune` may have deleted from the outbox
    malformed: Mapping[str, int] = field(default_factory=dict)  # by reason, records that break the contract
    acknowledged: int = 0  # more of these, whose dead letters were discarded
    lost: list[str] = field(default_factory=list)  # ids of events that the topic has skipped
    findings: list[Finding] = field(default_factory=list)

    @property
    def duplicates(self) -> int:
        """The number of records that repeat an event."""
        return self.repeated.total()

    def find(self, code: str, count: int, first: str = "", worst: str = "", detail: str = "") -> None:
        """Note a problem, if there are any such things."""
        noun, text = PROBLEMS[code]
        if count:
            message = f"topic {self.name}: {plural(count, noun)} {text}{detail}"
            self.findings.append(Finding(code, message, count, first, worst, topic=self.name))

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return _picked(self, "name", *COUNTS, "lost", "malformed", "repeated")


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

    @property
    def differing_keys(self) -> int:
        """How many keys differ, by their totals or by their rows."""
        return len(self.drift) or self.differences.count

    @property
    def result(self) -> str:
        """The result of the comparison, in words."""
        keys = plural(self.differing_keys, "key")
        if self.not_compared:
            return f"is not compared: {self.not_compared}"
        if self.differences.count:
            return f"differs in {keys}"
        if self.drift:
            return f"drifts by {text_of(self.drift_total)} in {keys}"
        return f"equals the source ({plural(self.keys, 'key')})"

    @property
    def worst_drifts(self) -> list[str]:
        """The largest drifts, each with its key."""
        worst = sorted(self.drift.items(), key=lambda entry: -abs(entry[1]))[:WORST_SHOWN]
        return [f"{key} {text_of(difference, sign='+')}" for key, difference in worst]

    def finding(self, sink: str) -> Finding:
        """The problem that keys differ. Values of rows are in the report alone."""
        code, worst = "sink-drift", next(iter(self.worst_drifts), "")
        if self.differences.count:
            code, worst = "rows-differ", self.differences.worst[0].summary
        message = f"sink {sink}: {self.name} {self.result}"
        return Finding(code, message, self.differing_keys, worst=worst, sink=sink, comparison=self.name)

    def lines(self) -> Iterator[str]:
        """For a person, with the keys that differ most."""
        uncertain = f", {plural(len(self.uncertain), 'key')} uncertain" if self.uncertain else ""
        yield f"{self.name} {self.result}{uncertain}"
        yield from (f"  {worst}" for worst in self.worst_drifts)
        for row in self.differences.worst[:WORST_SHOWN]:
            kind = "" if row.row == "differs" else f"is {row.row} in the sink: "
            yield f"  {row.key}  {kind}{'; '.join(row.lines)}"
        if self.differences.count > WORST_SHOWN:
            yield f"  and {plural(self.differences.count - WORST_SHOWN, 'more key')}"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            **_picked(self, "name", "keys", "drift", "drift_total", "not_compared", "differing_keys"),
            "uncertain_keys": len(self.uncertain),
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
    failure: str = ""  # why its target cannot be read, if so

    @classmethod
    def of(cls, state: SinkState, comparisons: Sequence[ComparisonReport] = ()) -> SinkReport:
        """The report of a sink of which nothing was compared yet."""
        copied = _picked(state, "name", "discarded", "duplicates", "filtered", "not_compared", "failure")
        return cls(**copied, comparisons=list(comparisons))

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
        found = [one.finding(self.name) for one in self.comparisons if one.differing_keys]
        if self.failure:
            message = f"sink {self.name}: its target cannot be read: {self.failure}"
            found.append(Finding("target-unreadable", message, 1, sink=self.name))
        if self.parked:
            message = f"sink {self.name} has set {plural(self.parked, 'event')} aside"
            found.append(Finding("sink-parked", message, self.parked, self.first_parked, sink=self.name))
        return found

    def lines(self) -> Iterator[str]:
        """For a person."""
        lost = f", {self.lost} lost" if self.lost else ""
        not_compared = f"; not compared: {self.not_compared}" if self.not_compared else ""
        yield f"{self.in_flight} in flight, {self.parked} set aside{lost}{not_compared}"
        if self.discarded:
            most = sorted(self.discarded.items(), key=lambda entry: (-entry[1], entry[0]))
            shown = [f"{reason} ({count})" for reason, count in most[:REASONS_SHOWN]]
            shown += ["…"] if len(most) > REASONS_SHOWN else []
            yield f"{sum(self.discarded.values())} discarded: {', '.join(shown)}"
        if self.filtered:
            yield f"{plural(self.filtered, 'event')} filtered by its transform"
        for comparison in self.comparisons:
            yield from comparison.lines()

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            **_picked(
                self, "name", "in_flight", "lost", "parked", "discarded", "duplicates", "filtered", "not_compared"
            ),
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
    notes: list[str] = field(default_factory=list)  # what is not compared, and why
    verified: Verified | None = None  # where the next incremental check may begin

    outbox_events = _Sum()
    records = _Sum()
    acknowledged = _Sum()
    duplicates = _Sum()
    in_flight = _Sum()
    pruned = _Sum()

    @property
    def findings(self) -> list[Finding]:
        """All problems, those of topics first."""
        of_topics = [finding for topic in self.topics for finding in topic.findings]
        return of_topics + [finding for sink in self.sinks for finding in sink.findings]

    def count(self, code: str) -> int:
        """How many problems of a kind there are."""
        return sum(finding.count for finding in self.findings if finding.code == code)

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
            "total": _picked(self, *COUNTS),
            "sinks": [sink.as_dict() for sink in self.sinks],
            **_picked(self, "notes", "settled"),
            "findings": [vars(finding) for finding in self.findings],
        }

    def as_json(self) -> str:
        """For a script. Numbers are exact, also those with a fraction."""
        return msgspec.json.format(msgspec.json.Encoder(decimal_format="number").encode(self.as_dict())).decode()

    def as_text(self) -> str:
        """For a person: topic by topic, and sink by sink."""
        parts = {f"topic {one.name}": [*_counts(one), *map(str, one.findings)] for one in self.topics}
        if len(self.topics) > 1:
            parts["all topics"] = [*_counts(self)]
        parts |= {f"sink {one.name}": [*one.lines()] for one in self.sinks}
        lines = [line for title, part in parts.items() for line in (title, *(f"  {line}" for line in part))]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def _counts(of: TopicReport | Report) -> Iterator[str]:
    records = f"{plural(of.records, 'record')}, {plural(of.duplicates, 'duplicate')}"
    yield f"{records}; {plural(of.outbox_events, 'event')} in the outbox"
    pruned = f", {of.pruned} pruned from the outbox" if of.pruned else ""
    acknowledged = f", {of.acknowledged} outside the contract and discarded" if of.acknowledged else ""
    yield f"{len(of.lost)} lost, {of.in_flight} in flight{pruned}{acknowledged}"


def sum_of_sizes(numbers: Iterable[Decimal]) -> Decimal:
    """The exact sum of absolute numbers."""
    total = Decimal(0)
    for one in numbers:
        total = EXACT.add(total, one.copy_abs())
    return total


def _picked(part: object, *names: str) -> dict[str, Any]:
    return {name: getattr(part, name) for name in names}
