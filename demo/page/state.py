"""The page's state of the chain, made of one reading after the other. Pure: no I/O."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from demo.page.drift import Drift
from demo.page.journeys import Journeys
from demo.page.readings import Batch, Connector, Down, Readings, Sink, Slot, Source, Topics, Total

DRAWN = 24  # marks of a partition on the page
UNSEEN_MS = 60_000  # after so long without a reading, a cause is not known
NO_CAUSE = "no button of this page"

Json = dict[str, Any]


@dataclass
class Shown:
    """Changes of a reading: see `demo.page.hub`."""

    parts: Json = field(default_factory=dict)
    logs: dict[str, list[Json]] = field(default_factory=dict)
    tables: dict[str, list[Json]] = field(default_factory=dict)


class State:
    """The chain as the page has it."""

    def __init__(self) -> None:
        self.journeys = Journeys()
        self._drifts: dict[str, Drift] = defaultdict(Drift)
        self._totals: Mapping[str, Total] = {}
        self._ends: Mapping[str, Mapping[int, int]] = {}
        self._partitions: dict[tuple[str, int], list[Json]] = {}
        self._gaps: dict[frozenset[str], int] = {}  # by pair of sinks, how far their drifts differ
        self._marked: set[frozenset[str]] = set()  # pairs with a mark for the present cause
        self._cause = "the beginning"
        self._compared_ms: int | None = None  # when the sinks were last compared
        self.settled = False
        self.summary: Json = {}

    @property
    def cause(self) -> str:
        """The last action, until everything has settled."""
        return self._cause

    @cause.setter
    def cause(self, cause: str) -> None:
        self._cause = cause
        self._marked.clear()

    def apply(self, readings: Readings) -> Shown:
        """Take a reading, and return what it changes on the page."""
        shown = Shown()
        self._apply_source(readings, shown)
        self._apply_connector(readings, shown)
        self._apply_topics(readings, shown)
        self._apply_sinks(readings, shown)
        shown.tables["events"] = [one.as_json() for one in self.journeys.changed()]
        return shown

    def _apply_source(self, readings: Readings, shown: Shown) -> None:
        match readings.source:
            case Down(reason):
                shown.parts["source"] = {"down": reason}
            case Source() as source:
                self._totals = source.totals
                self.journeys.add_rows(source.rows, source.end_lsn, source.oldest_ms)
                shown.parts["source"] = {
                    "accounts": source.accounts,
                    "transfers": source.transfers,
                    "events": source.events,
                    "newest": [
                        {"id": row.id, "key": row.key, "version": row.schema_version} for row in source.rows[-DRAWN:]
                    ],
                }
        match readings.slot:
            case Down(reason):
                shown.parts["slot"] = {"down": reason}
            case Slot() as slot:
                shown.parts["slot"] = {
                    "active": slot.is_active,
                    "lag_bytes": slot.lag_bytes,
                    "confirmed": f"{slot.confirmed_lsn >> 32:X}/{slot.confirmed_lsn & 0xFFFFFFFF:X}",
                }

    def _apply_connector(self, readings: Readings, shown: Shown) -> None:
        match readings.connector:
            case Down(reason):
                shown.parts["connect"] = {"down": reason}
            case Connector() as connector:
                shown.parts["connect"] = {
                    "state": connector.state,
                    "task": connector.task,
                    "mode": connector.mode,
                    "boundary": connector.boundary,
                    "error": connector.error,
                }

    def _apply_topics(self, readings: Readings, shown: Shown) -> None:
        match readings.topics:
            case Down(reason):
                shown.parts["topics"] = {"down": reason}
            case Topics() as topics:
                self._ends = topics.ends
                for record in topics.records:
                    event_id = record.event_id or f"{record.topic}/{record.partition}/{record.offset}"
                    lane = self._partitions.setdefault((record.topic, record.partition), [])
                    lane.append(
                        {
                            "id": event_id,
                            "key": record.key,
                            "version": record.headers.get("schemaVersion", ""),
                            "offset": record.offset,
                            "again": self.journeys.has_come(event_id),
                        }
                    )
                    del lane[:-DRAWN]
                    self.journeys.add_records([record])
                shown.parts["topics"] = {
                    "repeats": self.journeys.repeats,
                    "strangers": self.journeys.strangers,
                    "topics": [
                        {
                            "name": name,
                            "partitions": [
                                {"number": number, "end": end, "newest": self._lane(name, number)}
                                for number, end in sorted(ends.items())
                            ],
                        }
                        for name, ends in sorted(topics.ends.items())
                    ],
                }

    def _lane(self, topic: str, partition: int) -> list[Json]:
        """The newest marks of a partition. A stranger has no version that counts."""
        marks = self._partitions.get((topic, partition), [])
        return [one | {"version": ""} if self.journeys.is_stranger(one["id"]) else one for one in marks]

    def _apply_sinks(self, readings: Readings, shown: Shown) -> None:
        if isinstance(readings.sinks, Down):
            shown.parts["sinks"] = {"down": readings.sinks.reason}
            self.settled = False
            return
        self.journeys.add_sinks(readings.sinks, readings.at_ms)
        sinks = [self._sink(sink, readings) for sink in readings.sinks]
        shown.parts["sinks"] = {"sinks": sinks}
        compared = [one for one in sinks if one["drift"] is not None]
        self.settled = (
            bool(compared)
            and not isinstance(readings.source, Down)
            and not isinstance(readings.topics, Down)
            and all(one["pending"] == 0 and one["state"] == "running" for one in compared)
            and all(self._has_read_all(sink) for sink in readings.sinks if sink.totals is not None)
        )
        self.summary = {one["name"]: one for one in compared}
        shown.logs["samples"] = [
            {
                "at_ms": readings.at_ms,
                "sinks": {
                    one["name"]: [one["total"], one["drift"], one["duplicates"], one["set_aside"], one["lag"]]
                    for one in compared
                },
            }
        ]
        shown.logs["marks"] = self._partings(compared, readings.at_ms)

    def _sink(self, sink: Sink, readings: Readings) -> Json:
        health = readings.health
        state = "down" if isinstance(health, Down) else health.get(sink.name, {}).get("state", "not running")
        drift = self._drifts[sink.name]
        if sink.totals is not None and not isinstance(readings.source, Down):
            drift.compare(self._totals, sink.totals)
        return {
            "name": sink.name,
            "strategy": sink.strategy,
            "transform": sink.transform,
            "state": state,
            "applied": sink.applied,
            "duplicates": sink.duplicates,
            "set_aside": sink.set_aside,
            "lag": self._lag(sink),
            "total": None if sink.totals is None else sum(abs(one.total) for one in sink.totals.values()),
            "drift": None if sink.totals is None else drift.total,
            "drift_keys": drift.keys,
            "pending": drift.pending,
            "compared": drift.is_compared,
            "batches": _sizes(sink.batches),
        }

    def _lag(self, sink: Sink) -> int:
        """Offsets that Spark has not recorded as read. Positions do not fall when a sink is rewound, so they count only
        without a checkpoint to look at.
        """
        read = next((one.ends for one in reversed(sink.batches) if one.committed_ms is not None), {})
        done = read if sink.batches else sink.positions
        return sum(
            max(0, end - done.get(topic, {}).get(partition, 0))
            for topic, ends in self._ends.items()
            if topic in sink.positions
            for partition, end in ends.items()
        )

    def _has_read_all(self, sink: Sink) -> bool:
        """Whether Spark has recorded a batch up to the end of the topics. Positions do not fall when a sink is rewound,
        so they do not say.
        """
        if not sink.batches or sink.batches[-1].committed_ms is None:
            return False
        ends = sink.batches[-1].ends
        return all(
            ends[topic].get(partition, 0) >= end
            for topic, of_topic in self._ends.items()
            if topic in ends
            for partition, end in of_topic.items()
        )

    def _partings(self, compared: list[Json], at_ms: int) -> list[Json]:
        """A mark for each pair of sinks whose drifts begin to differ, or differ more: one for each cause. The cause is
        not known if nobody looked.
        """
        is_seen = self._compared_ms is not None and at_ms - self._compared_ms < UNSEEN_MS
        self._compared_ms = at_ms
        cause = self._cause if is_seen else "while nobody looked"
        found = []
        for index, left in enumerate(compared):
            for right in compared[index + 1 :]:
                pair = frozenset((left["name"], right["name"]))
                gap, before = abs(left["drift"] - right["drift"]), self._gaps.get(pair, 0)
                if left["pending"] and gap > before:
                    continue  # it may be less when all is applied
                self._gaps[pair] = gap
                if gap > before and pair not in self._marked:
                    self._marked.add(pair)
                    what = "drift further apart" if before else "part"
                    text = f"{left['name']} and {right['name']} {what}: {cause}"
                    found.append({"at_ms": at_ms, "kind": "part", "text": text})
        return found


def _sizes(batches: Sequence[Batch]) -> list[Json]:
    """The batches with their sizes in offsets. The first one's is not known, unless it is the first of its checkpoint,
    which reads from the beginning.
    """
    found: list[Json] = []
    begin = 0 if batches and batches[0].number == 0 else None
    for batch in batches:
        end = sum(sum(of.values()) for of in batch.ends.values())
        size = None if begin is None else end - begin
        found.append({"number": batch.number, "records": size, "committed": batch.committed_ms is not None})
        begin = end
    return found
