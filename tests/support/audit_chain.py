"""A chain in memory for the comparison of `outbox check`: source, topic and one sink, each as a test wants it."""

from __future__ import annotations

import itertools
import json
import uuid
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

from outbox.audit.comparison import compare
from outbox.audit.report import Report, SinkReport
from outbox.audit.sinks import SinkState
from outbox.audit.source import Source, Written
from outbox.audit.topic_log import TopicLog
from outbox.audit.topic_part import TopicOffset
from outbox.audit.verified import Verified
from outbox.sink.records import EventDecoder, Record, Records
from outbox.writing.contract import EventSchema
from tests.support.events import as_read

NOW_MS = 1_795_000_000_000
MINUTE_MS = 60_000
READ_RECORDS = 500
SCHEMA = {
    "type": "object",
    "required": ["item", "change", "serial"],
    "properties": {
        "item": {"type": "string"},
        "change": {"type": "number", "minimum": -1_000_000, "maximum": 1_000_000},
        "serial": {"type": "integer", "minimum": 1, "maximum": 2**63 - 1},
    },
}


def schema(folder: Path) -> EventSchema:
    """The schema of the chain's events, in a file of this folder."""
    file = folder / "item-changed.v1.schema.json"
    file.write_text(json.dumps(SCHEMA))
    return EventSchema(file)


class Chain:
    """A source, a topic and one sink, each as the test wants it."""

    def __init__(self, decoder: EventDecoder, *, keeps_records: bool = False) -> None:
        self.decoder = decoder
        self._keeps_records = keeps_records  # for `compare_since`
        self.log = TopicLog(decoder)
        self.outbox: list[Written] = []
        self.totals: dict[str, Decimal] | None = {}
        self.versions: dict[str, int] | None = {}
        self.sink = SinkState("dedup")
        self.records: list[tuple[Record, TopicOffset]] = []
        self._unread: list[tuple[Record, TopicOffset]] = []
        self.offsets = {0: 0, 1: 0}
        self.now_ms = NOW_MS  # when a check reads the source
        self._numbers = itertools.count(1)

    def event(self, key: str, version: int, change: str = "1", at_ms: int = NOW_MS) -> Written:
        """An event that nobody has yet."""
        number = at_ms << 80 | 7 << 76 | 2 << 62 | next(self._numbers)
        counted = None if self.decoder.version is None else version
        quantity = Decimal(0) if self.decoder.quantity is None else Decimal(change)
        return Written(uuid.UUID(int=number).bytes, key, counted, quantity, at_ms)

    def written(self, key: str, *changes: str, at_ms: int = NOW_MS) -> list[Written]:
        """A key with an event in the outbox per change."""
        events = [self.event(key, version, change, at_ms) for version, change in enumerate(changes, start=1)]
        self.outbox += events
        if self.totals is not None:
            self.totals[key] = sum(map(Decimal, changes), Decimal(0))
        if self.versions is not None:
            self.versions[key] = len(changes)
        return events

    def publish(self, *events: Written, partition: int = 0, **changed: Any) -> None:
        """The events on the topic; ``changed`` are properties that differ."""
        for event in events:
            value = {"item": event.key, "change": float(event.quantity or 0), "serial": event.version or 1, **changed}
            self.record(event.event_id, event.key, json.dumps(value).encode(), partition=partition)

    def record(self, event_id: bytes | None, key: str, value: bytes, *, partition: int = 0) -> TopicOffset:
        """Any record."""
        headers = [] if event_id is None else [("id", str(uuid.UUID(bytes=event_id)).encode())]
        place = TopicOffset(partition, self.offsets[partition])
        record = Record(key.encode(), headers, value, NOW_MS)
        self._unread.append((record, place))
        if len(self._unread) >= READ_RECORDS:
            self.read()
        if self._keeps_records:
            self.records.append((record, place))
        self.offsets[partition] += 1
        return place

    def read(self) -> None:
        """Add the records that are not in the log yet."""
        self.log.add(_records(self._unread))
        self._unread.clear()

    def prune(self, *events: Written) -> None:
        """Remove events from the outbox, as `outbox prune` does."""
        self.outbox = [event for event in self.outbox if event not in events]

    def applied(self, totals: Mapping[str, str], **changes: Any) -> None:
        """The sink's totals. It has read all of the topic, unless ``changes`` say otherwise."""
        found = {key: Decimal(total) for key, total in totals.items()}
        self.sink = replace(self.sink, **{"positions": dict(self.offsets), "totals": found, **changes})

    def compare(self) -> Report:
        """Compare everything."""
        self.read()
        return self._compare(Source(iter(self.outbox), self.totals, self.versions), self.log)

    def compare_since(self, point: Verified) -> Report:
        """Compare what came since a point, as an incremental check does. May raise Doubt."""
        since = [event for event in self.outbox if event.occurred_ms >= point.since_ms]
        source = Source(iter(since), self.totals, self.versions, len(self.outbox) - len(since), self.now_ms)
        with closing(TopicLog(self.decoder, "x", self.offsets)) as log:
            log.add(
                _records([one for one in self.records if one[1].offset >= point.next_offsets.get(one[1].partition, 0)])
            )
            return self._compare(source, log, point)

    def _compare(self, source: Source, log: TopicLog, verified: Verified | None = None) -> Report:
        return compare(source, log, [self.sink], lambda _: None, topic="events", verified=verified)


def _records(read: Sequence[tuple[Record, TopicOffset]]) -> Records:
    places = [place for _, place in read]
    return replace(
        as_read(*(record for record, _ in read)),
        partitions=[place.partition for place in places],
        offsets=[place.offset for place in places],
    )


def codes(report: Report) -> list[str]:
    return [finding.code for finding in report.findings]


def only_sink(report: Report) -> SinkReport:
    (sink,) = report.sinks
    return sink
