"""The way of each event through the chain: when it was seen where."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from demo.page.readings import OutboxRow, Record, Sink

KEPT = 2_500  # more than a reading brings
SENT = 120  # to the page: the newest
IDS_KEPT = 50_000  # to recognise repeats on the topics


@dataclass
class Applied:
    """The outcome of an event at one sink."""

    batch: int | None = None  # the Spark batch that has it, if it is known
    is_applied: bool = False
    at_ms: int | None = None  # when Spark recorded that batch; or when the position was seen behind the event; if known


@dataclass
class Journey:
    """One event. Moments are in Unix milliseconds."""

    id: str
    row: OutboxRow | None = None
    written_ms: int | None = None
    lsn: int | None = None  # the end of the write-ahead log when the row was first seen: it was written before
    records: list[Record] = field(default_factory=list)  # more than one: it was sent again
    sinks: dict[str, Applied] = field(default_factory=dict)
    is_stranger: bool = False  # it is on the topics and was never in the outbox

    @property
    def began_ms(self) -> int:
        """When it was written: to the outbox, or to the topic."""
        return self.written_ms if self.written_ms is not None else min((one.at_ms for one in self.records), default=0)

    def as_json(self) -> dict[str, Any]:
        """For the page, without payload."""
        row, first = self.row, self.records[0] if self.records else None
        return {
            "id": self.id,
            "aggregate": row.aggregate if row else (first.topic.rpartition(".")[2] if first else ""),
            "type": row.type if row else self._header("eventType"),
            "version": row.schema_version if row else self._header("schemaVersion"),
            "key": row.key if row else (first.key if first else ""),
            "amount": row.amount if row else None,
            "written_ms": self.written_ms,
            "lsn": _lsn(self.lsn),
            "records": [
                {"topic": one.topic, "partition": one.partition, "offset": one.offset, "at_ms": one.at_ms}
                for one in self.records
            ],
            "sinks": {
                name: {"batch": one.batch, "applied": one.is_applied, "at_ms": one.at_ms}
                for name, one in self.sinks.items()
            },
        }

    def _header(self, name: str) -> str:
        """Value of a header of the record, if it is plausible."""
        return "" if self.is_stranger or not self.records else self.records[0].headers.get(name, "")


class Journeys:
    """The newest events. Those that were not seen for longest are forgotten."""

    def __init__(self) -> None:
        self._by_id: OrderedDict[str, Journey] = OrderedDict()  # the one that was seen last is the last
        self._seen_ids: OrderedDict[str, None] = OrderedDict()
        self._changed: dict[str, Journey] = {}
        self._strangers: OrderedDict[str, None] = OrderedDict()
        self._oldest_ms: int | None = None  # when the oldest row of the outbox was written
        self.repeats = 0  # records of events that were on the topics already

    def get(self, event_id: str) -> Journey | None:
        """One of the newest events."""
        return self._by_id.get(event_id)

    def has_come(self, event_id: str) -> bool:
        """Whether a record of the event is on the topics."""
        return event_id in self._seen_ids

    @property
    def strangers(self) -> int:
        """How many are on the topics and were never in the outbox."""
        return len(self._strangers)

    def is_stranger(self, event_id: str) -> bool:
        """Whether it is on the topics and was never in the outbox: no event of ours, whatever its headers say."""
        return event_id in self._strangers

    def changed(self) -> list[Journey]:
        """Journeys among the newest that have changed since the last call, in the order of their beginnings."""
        changed, self._changed = self._changed, {}
        newest = sorted(self._by_id.values(), key=lambda one: one.began_ms)[-SENT:] if changed else []
        return [one for one in newest if one.id in changed]

    def add_rows(self, rows: Iterable[OutboxRow], lsn: int, oldest_ms: int | None = None) -> None:
        """Rows of the outbox, and when its oldest row was written. Rows that are known stay as they are."""
        self._oldest_ms = oldest_ms
        for row in rows:
            journey = self._of(row.id)
            self._strangers.pop(row.id, None)
            journey.is_stranger = False
            if journey.row is None:
                journey.row, journey.written_ms, journey.lsn = row, row.occurred_ms, lsn
                self._changed[row.id] = journey

    def add_records(self, records: Iterable[Record]) -> None:
        """New records of the topics, in their order, after the rows of their events."""
        for record in records:
            event_id = record.event_id or f"{record.topic}/{record.partition}/{record.offset}"
            self.repeats += event_id in self._seen_ids
            self._seen_ids[event_id] = None
            journey = self._of(event_id)
            journey.records.append(record)
            if journey.row is None and self._never_had(record):
                journey.is_stranger, self._strangers[event_id] = True, None
            self._changed[event_id] = journey
        _bound(self._seen_ids, IDS_KEPT)
        _bound(self._strangers, IDS_KEPT)

    def _never_had(self, record: Record) -> bool:
        """Whether the outbox never had the row of a record that it has not. What is older than its rows may have been
        pruned.
        """
        return record.event_id is None or (self._oldest_ms is not None and record.at_ms > self._oldest_ms)

    def add_sinks(self, sinks: Iterable[Sink], at_ms: int) -> None:
        """How far each sink is. What it has applied before its position, it has applied by now."""
        for sink in sinks:
            for journey in self._by_id.values():
                if journey.records:
                    self._follow(journey, sink, at_ms)

    def _follow(self, journey: Journey, sink: Sink, at_ms: int) -> None:
        record = journey.records[0]
        position = sink.positions.get(record.topic, {}).get(record.partition)
        if position is None:
            return  # it does not read that topic
        is_new = sink.name not in journey.sinks
        applied = journey.sinks.setdefault(sink.name, Applied())
        if applied.is_applied:
            return
        batch = _batch_of(record, sink) if applied.batch is None else None
        if batch is not None:
            applied.batch = batch
            self._changed[journey.id] = journey
        if position > record.offset:
            recorded = next((one.committed_ms for one in sink.batches if one.number == applied.batch), None)
            applied.is_applied = True
            applied.at_ms = recorded or (None if is_new and applied.batch is None else at_ms)
            self._changed[journey.id] = journey

    def _of(self, event_id: str) -> Journey:
        journey = self._by_id.setdefault(event_id, Journey(event_id))
        self._by_id.move_to_end(event_id)
        _bound(self._by_id, KEPT)
        return journey


def _batch_of(record: Record, sink: Sink) -> int | None:
    """The batch that has a record; None if it is not planned, or not certain: before the first batch that is kept there
    were others.
    """
    known = -1  # the number of the batch before
    for batch in sink.batches:
        if batch.ends.get(record.topic, {}).get(record.partition, 0) > record.offset:
            return batch.number if batch.number == known + 1 else None
        known = batch.number
    return None


def _bound(entries: OrderedDict[str, Any], most: int) -> None:
    """Drop the oldest entries."""
    while len(entries) > most:
        entries.popitem(last=False)


def _lsn(position: int | None) -> str | None:
    """A position in the write-ahead log as Postgres writes it."""
    return None if position is None else f"{position >> 32:X}/{position & 0xFFFFFFFF:X}"
