"""A chain in memory for the comparison of `outbox check`: source, topics and one sink, each as a test wants it."""

from __future__ import annotations

import itertools
import json
import re
import uuid
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from decimal import Decimal
from hashlib import sha256
from pathlib import Path
from typing import Any

from outbox.audit import declared
from outbox.audit.comparison import Observed, compare
from outbox.audit.declared import Declared, number_of, text_of
from outbox.audit.report import ComparisonReport, Report, SinkReport
from outbox.audit.rows import SINK as SINK_ROWS
from outbox.audit.rows import SOURCE, load_rows
from outbox.audit.sinks import Letter, Sinks, SinkState, TopicOffset
from outbox.audit.source import Source, Written
from outbox.audit.store import Store, TopicLogs
from outbox.audit.verified import Verified
from outbox.events import catalog
from outbox.sink.comparison_files import AddsLine, Comparison
from outbox.sink.decoding.records import Record
from outbox_lab.testing.sinks import at_places
from tests.support.declared_sinks import sink as sink_of

NOW_MS = 1_795_000_000_000
MINUTE_MS = 60_000
SINK = "dedup"
STOCK_TOPIC = "chain.stock"
KEY = {"item": {"type": "string"}, "serial": {"type": "integer", "minimum": 1, "maximum": 2**63 - 1}}
CHANGE = {"type": "number", "minimum": -1_000_000, "maximum": 1_000_000}
# By event and version its properties; the chain's own event is the first.
EVENTS: dict[str, dict[str, Any]] = {
    "stock/changed.v1": {**KEY, "change": CHANGE},
    "stock/named.v1": {**KEY, "name": {"type": "string"}},
    "order/placed.v1": {**KEY, "dozens": {"type": "integer", "minimum": 0, "maximum": 1000}},
    "order/placed.v2": {**KEY, "change": CHANGE},
}
UPCAST = """
def placed_v1(payload):
    return {"item": payload["item"], "serial": payload["serial"], "change": 12 * payload["dozens"]}
"""
STOCK = Comparison(Path("stock.sql"), (AddsLine(1, "change", frozenset({"stock.changed", "order"})),), "")


@dataclass(frozen=True)
class Made:
    """An event that was made, with its row in the outbox."""

    row: Written
    event: str
    payload: Mapping[str, Any]

    @property
    def event_id(self) -> str:
        return self.row.event_id


def declare(
    folder: Path,
    *,
    names: Sequence[str] = ("stock",),
    comparisons: Sequence[Comparison] = (STOCK,),
    has_version: bool = True,
    takes: str = "dedup",
) -> Declared:
    """The chain's events in files of this folder, and a sink that asks for those of these names."""
    for event, properties in EVENTS.items():
        file = folder / f"{event}.schema.json"
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps({"type": "object", "required": sorted(properties), "properties": properties}))
        version = 'version = "serial"\n' if has_version else ""
        view = f'source = "source_{file.parent.name}"\n'
        (file.parent / catalog.AGGREGATE_FILE).write_text(f'key = "item"\n{version}{view}')
    (folder / "order" / "upcast.py").write_text(UPCAST)
    known = catalog.load.__wrapped__(folder, "chain")
    spec = sink_of(known, *names, projections=folder, name=SINK, by=takes)
    return declared.of_catalog(known, {SINK: spec}, {SINK: comparisons})


class Chain:
    """A source, its topics and one sink, each as the test wants it."""

    def __init__(self, declared: Declared) -> None:
        self.declared = declared
        self._topics = {topic.name.removeprefix("chain."): topic for topic in declared.topics}
        self.outbox: list[Made] = []
        self.totals: dict[str, Decimal] = {}
        self.versions: dict[str, dict[str, int]] = {topic.name: {} for topic in declared.topics}
        self.sink = SinkState(SINK)
        self.held: dict[str, Decimal] = {}  # the sink's totals, by every comparison
        self.acknowledged: set[str] = set()
        self.erased: set[tuple[str, str]] = set()
        self.records: list[tuple[int, Record, TopicOffset]] = []
        self.offsets = {topic.name: {0: 0, 1: 0} for topic in declared.topics}
        self.dropped_until_ms: int | None = None  # None: the topics have dropped nothing
        self.now_ms = NOW_MS  # when a check reads the source
        self._numbers = itertools.count(1)

    def event(
        self, key: str, version: int, change: str = "1", at_ms: int = NOW_MS, event: str = "stock/changed.v1"
    ) -> Made:
        """An event that nobody has yet."""
        number = at_ms << 80 | 7 << 76 | 2 << 62 | next(self._numbers)
        aggregate, type_, schema_version = re.split(r"/|\.v", event)
        topic = self._topics[aggregate]
        kinds = [kind.row for kind in self.declared.kinds]
        values = {"change": float(change), "dozens": int(Decimal(change)) // 12, "name": change}
        payload = {"item": key, "serial": version, **{one: values[one] for one in EVENTS[event].keys() - KEY.keys()}}
        row = Written(
            topic=topic.number,
            kind=kinds.index((aggregate, type_, int(schema_version))),
            event_id=str(uuid.UUID(int=number)),
            key=key,
            version=None if topic.decoder.version is None else version,
            numbers=[change if "named" not in event else None for _ in topic.properties],
            occurred_ms=at_ms,
            payload=json.dumps(payload) if event == "order/placed.v1" else None,
        )
        return Made(row, event, payload)

    def written(self, key: str, *changes: str, at_ms: int = NOW_MS, event: str = "stock/changed.v1") -> list[Made]:
        """A key with an event in the outbox per change."""
        events = [self.event(key, version, change, at_ms, event) for version, change in enumerate(changes, start=1)]
        self.outbox += events
        self.totals[key] = sum(map(Decimal, changes), Decimal(0))
        self.versions.get(self.declared.topics[events[0].row.topic].name, {})[key] = len(changes)
        return events

    def more(self, key: str, change: str = "1", at_ms: int = NOW_MS) -> Made:
        """One more event of a key in the outbox."""
        versions = self.versions[STOCK_TOPIC]
        versions[key] = versions.get(key, 0) + 1
        self.totals[key] = self.totals.get(key, Decimal(0)) + Decimal(change)
        self.outbox.append(self.event(key, versions[key], change, at_ms))
        return self.outbox[-1]

    def publish(self, *events: Made, partition: int = 0, **changed: Any) -> list[TopicOffset]:
        """The events on their topics, with ``changed`` properties. Returns their places."""
        contents = [(one, json.dumps({**one.payload, **changed}).encode()) for one in events]
        return [
            self.record(one.event_id, one.row.key, value, partition=partition, event=one.event)
            for one, value in contents
        ]

    def record(
        self, event_id: str | None, key: str, value: bytes, *, partition: int = 0, event: str = "stock/changed.v1"
    ) -> TopicOffset:
        """Any record on the topic of an event."""
        aggregate, type_, version = re.split(r"/|\.v", event)
        topic = self._topics[aggregate]
        headers = [("eventType", type_.encode()), ("schemaVersion", version.encode())]
        if event_id is not None:
            headers.append(("id", event_id.encode()))
        place = TopicOffset(partition, self.offsets[topic.name][partition])
        self.records.append((topic.number, Record(key.encode(), headers, value, NOW_MS), place))
        self.offsets[topic.name][partition] += 1
        return place

    def prune(self, *events: Made) -> None:
        """Remove events from the outbox, as `outbox prune` does."""
        self.outbox = [event for event in self.outbox if event not in events]

    def erase(self, key: str) -> None:
        """Note that a key was erased, of whatever topic."""
        self.erased |= {(topic.name, sha256(key.encode()).hexdigest()) for topic in self.declared.topics}

    def applied(self, totals: Mapping[str, str], versions: Mapping[str, int] | None = None, **changes: Any) -> None:
        """The sink's totals, by every comparison. It has read all topics, unless ``changes`` say otherwise.

        ``versions``, and ``positions`` and ``bases`` of ``changes``, are those of the stock topic.
        """
        self.held = {key: Decimal(total) for key, total in totals.items()}
        ends = {topic: dict(offsets) for topic, offsets in self.offsets.items()}
        if all(isinstance(one, int) for one in changes.get("positions", ["all"])):
            changes["positions"] = {**ends, STOCK_TOPIC: changes["positions"]}
        if "bases" in changes:
            changes["bases"] = {STOCK_TOPIC: changes["bases"]}
        self.sink = replace(self.sink, **{"positions": ends, "versions": {STOCK_TOPIC: versions or {}}, **changes})

    def compare(self, since: Verified | None = None) -> Report:
        """Compare everything; or what came since a point, as an incremental check does. May raise Doubt then."""
        topics, point = self.declared.topics, since or Verified()
        rows = [one.row for one in self.outbox]
        events = [row for row in rows if row.occurred_ms >= point.topic(topics[row.topic].name).since_ms]
        with closing(TopicLogs(topics, point.ends)) as logs:
            for number, end in enumerate(logs.ends):
                self._read(logs, number)
                end.next_offsets, end.topic_id = dict(self.offsets[topics[number].name]), "x"
                end.is_whole, end.dropped_until_ms = self.dropped_until_ms is None, self.dropped_until_ms or 0
            self.load(logs.store)
            sinks = Sinks([self.sink], frozenset(self.acknowledged), erased=frozenset(self.erased))
            source = Source(events, self.versions, read_at_ms=self.now_ms)
            return compare(Observed(self.declared, sinks, logs, source), lambda _: None, since)

    def _read(self, logs: TopicLogs, number: int) -> None:
        begin = logs.ends[number].next_offsets
        on_topic = [(record, place) for topic, record, place in self.records if topic == number]
        read = [(record, place) for record, place in on_topic if place.offset >= begin.get(place.partition, 0)]
        if read:
            logs.add(number, at_places([record for record, _ in read], [place for _, place in read]))

    def load(self, store: Store) -> None:
        """Put the totals of both sides into a store."""
        for table, sink, totals in ((SOURCE, "", self.totals), (SINK_ROWS, SINK, self.held)):
            rows = [(sink, key, None, text_of(total)) for key, total in totals.items()]
            load_rows(store, table, ((one, rows) for one in self.declared.all_comparisons))

    def expect(self, *expected: str, **values: object) -> Report:
        """Compare everything. The codes of the findings are these, and so are numbers of the report.

        ``sink_…`` are numbers of the sink; ``drift``, ``uncertain`` and ``repeated`` are those of its first comparison.
        """
        report = self.compare()
        sink = only_sink(report)
        known: dict[str, object] = {f"sink_{name}": value for name, value in vars(sink).items()}
        for one in sink.comparisons[:1]:
            known |= {"drift": one.drift, "uncertain": one.uncertain, "repeated": one.repeated}
        found = {name: known[name] if name in known else getattr(report, name) for name in values}
        assert (codes(report), found) == (list(expected), values)
        return report


def letter(event: Made, **changes: Any) -> dict[str, Letter]:
    """By its id the open dead letter of a valid event of the stock topic, with these changes."""
    row = event.row
    numbers = tuple(map(number_of, row.numbers))
    made = Letter(STOCK_TOPIC, row.key, kind=row.kind, version=row.version, numbers=numbers)
    return {event.event_id: made._replace(**changes)}


def invalid(event: Made, place: TopicOffset, **changes: Any) -> dict[str, Letter]:
    """By its id the open dead letter of a record of the stock topic that breaks the contract."""
    return {event.event_id: Letter(STOCK_TOPIC, event.row.key, place=place, is_event=False, **changes)}


def codes(report: Report) -> list[str]:
    return [finding.code for finding in report.findings]


def only_sink(report: Report) -> SinkReport:
    (sink,) = report.sinks
    return sink


def only_comparison(report: Report) -> ComparisonReport:
    (comparison,) = only_sink(report).comparisons
    return comparison
