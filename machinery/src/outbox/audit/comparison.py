"""Compare source, topics and sinks: pure, on what was read before.

Which events count
    A record that breaks the contract counts in no drift, gap or loss. If it is an event of the outbox, nobody knows
    what it should have added. So its key is *uncertain*, and not compared, for every sink that has set it aside or not
    read it yet. A record whose dead letter was discarded is acknowledged: it is no finding any more.

In flight or lost
    The relay keeps the order of commits. An event of the outbox that is not on its topic is lost if a later event of
    its key is there: one with a higher version. Events without versions are compared by time: a lost one is more than
    `LATE_MS` older than another event that was relayed. Other missing events are in flight, unless they are so old that
    the topic has dropped them.

Foreign or pruned
    An event on a topic that the outbox does not have was deleted by `outbox prune`, or never was there. It is
    *foreign*, never there, if either is true:

    - Its version is higher than the version of its key in the source.
    - The outbox still has an older event that stands before it in the same partition. That one was committed first,
      because the relay keeps the order of commits. Prune deletes every relayed event up to a time, so it would have
      deleted the older one too. `CLOCK_MARGIN_MS` allows for the two ways in which a row notes its time.

    Every other event counts as pruned. The keep-hours of prune prove nothing: a run may have used others.
"""

from __future__ import annotations

import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cached_property
from itertools import product

from outbox.audit import buckets, letters, versions
from outbox.audit.buckets import Buckets
from outbox.audit.declared import Declared, EventTopic
from outbox.audit.quantity import EXACT
from outbox.audit.report import ComparisonReport, EventCounts, Report, SinkReport, TopicReport
from outbox.audit.sinks import Sinks, SinkState
from outbox.audit.source import LATE_MS, Source, Written
from outbox.audit.tally import Fate, Tally, TopicTally
from outbox.audit.topic_log import TopicLogs
from outbox.audit.topic_part import EVENT_ID_BYTES, Delivered, Refused, TopicOffset
from outbox.audit.totals import Totals
from outbox.audit.verified import Doubt, EventsBefore, TopicPoint, Verified
from outbox.audit.versions import Counted, Numbered, Versions

CLOCK_MARGIN_MS = 1_000  # between the time inside a UUIDv7 and occurred_at of the same row
UUID_V7 = 7
UNDECLARED = "(undeclared)"  # events of the outbox whose type or version is not declared
NO_VERSIONS = "a query has no column version, by which states are compared"


@dataclass(frozen=True)
class Observed:
    """What was read: the sinks first, then the topics, then the source."""

    declared: Declared
    sinks: Sinks
    logs: TopicLogs
    source: Source


@dataclass
class _Bucket:
    """The rows of one topic in one bucket; of events on the topic all, and by id the first of each."""

    delivered: list[tuple[bytes, Delivered]] = field(default_factory=list)
    firsts: dict[bytes, Delivered] = field(default_factory=dict)
    refused: list[tuple[bytes, Refused]] = field(default_factory=list)
    written: list[tuple[bytes, Written]] = field(default_factory=list)


class _TopicComparison:
    """The comparison of one topic: three passes over its buckets, because what a pass finds decides in the next one."""

    def __init__(self, seen: Observed, topic: EventTopic, tallies: Iterable[Tally], point: TopicPoint) -> None:
        declared = seen.declared
        self.topic, self.point = topic, point
        self._log = seen.logs.ends[topic.number]
        self._source_versions = seen.source.versions.get(topic.name)
        self._acknowledged = seen.sinks.acknowledged
        self._states = [state for state in seen.sinks.states if _reads(declared, state, topic)]
        self._tallies = [TopicTally(tally, topic) for tally in tallies if topic.name in tally.topics]
        self._earliest: dict[int, tuple[int, int]] = {}  # by partition, offset and time of the outbox's first event
        self._latest_ms = 0  # the time of the outbox's latest event that is on the topic
        self.partitions = dict(point.partitions)  # by key, that of its first event
        self._spread: dict[str, set[int]] = defaultdict(set)  # by key, its partitions if there are several
        # By key, of the events on the topic that are not foreign.
        self._versions = {key: Versions.complete(*one) for key, one in point.versions.items()}
        self._refused_keys: Counter[str] = Counter()
        self._distinct: Counter[str] = Counter()  # versions of the unclear keys that were read
        self.report = TopicReport(
            topic.name,
            outbox_events=seen.source.events_before.get(topic.name, 0),
            records=point.records + self._log.records,
            verified_before=point.records,
        )
        self.report.malformed.acknowledged = point.acknowledged
        self._counts: dict[int, EventCounts] = {}  # by kind; those of an event are the same
        for number, kind in enumerate(declared.kinds):
            if kind.topic == topic.name:
                before = point.events.get(kind.event, EventsBefore())
                counts = EventCounts(before.delivered, before.duplicates, pruned=before.pruned)
                self._counts[number] = self.report.events.setdefault(kind.event, counts)
        if not point.is_beginning:
            if self._log.has_gap:
                raise Doubt(f"topic {topic.name} has dropped records that were not read")
            point.require_usual(topic.name, self._states, self._source_versions)

    def match(self, bucket: _Bucket) -> None:
        """Count duplicates, and note which events of the outbox are on the topic."""
        for event_id, event in bucket.delivered:
            counts = self._counts[event.kind]
            counts.delivered += 1
            partition = self.partitions.setdefault(event.key, event.partition)
            if partition != event.partition:
                self._spread[event.key] |= {partition, event.partition}
            if bucket.firsts[event_id] is not event:
                counts.duplicates += 1
                for tally in self._tallies:
                    tally.repeat(event)
        for event_id, row in bucket.written:
            self.report.outbox_events += 1
            if event_id in bucket.firsts:
                self._note(bucket.firsts[event_id].place, row.occurred_ms)

    def _note(self, place: TopicOffset, occurred_ms: int) -> None:
        known = self._earliest.get(place.partition)
        if known is None or place.offset < known[0]:
            self._earliest[place.partition] = place.offset, occurred_ms
        self._latest_ms = max(self._latest_ms, occurred_ms)

    def count_delivered(self, bucket: _Bucket) -> None:
        """Count the events on the topic. Those that the outbox does not have are foreign or pruned."""
        written = dict(bucket.written)
        for event_id, event in bucket.firsts.items():
            is_written = event_id in written
            if not self.point.is_beginning:
                self._require_usual(event, is_written=is_written)
            is_foreign = not is_written and self._is_foreign(event_id, event)
            if is_foreign:
                self._counts[event.kind].foreign += 1
                text = f"{uuid.UUID(bytes=event_id)} at {event.place}, key {event.key}"
                self.report.foreign.add(text, event.numbers)
            else:
                self._counts[event.kind].pruned += not is_written
                versions.add(self._versions, event.key, event.version)
            for tally in self._tallies:
                tally.add(event_id, event, event.place, is_foreign=is_foreign)
        for identity, refused in bucket.refused:
            for tally in self._tallies:
                tally.meet(identity)
            if identity in self._acknowledged:
                self.report.malformed.acknowledged += 1
            else:
                self.report.malformed.add(refused)

    def _require_usual(self, event: Delivered, *, is_written: bool) -> None:
        if not is_written:
            raise Doubt(f"topic {self.topic.name}: an event at {event.place} is not in the outbox")
        if self.point.has(event.key, event.version):
            raise Doubt(f"topic {self.topic.name}: the event at {event.place} repeats a version that was verified")

    def _is_foreign(self, event_id: bytes, event: Delivered) -> bool:
        known = (self._source_versions or {}).get(event.key)
        if known is not None and event.version is not None and event.version > known:
            return True
        # The outbox has an older event that stands before this one: so prune has not deleted this one.
        offset, occurred_ms = self._earliest.get(event.partition, (event.offset, 0))
        return offset < event.offset and occurred_ms + CLOCK_MARGIN_MS < _made_at_ms(event_id)

    @cached_property
    def _unclear(self) -> set[str]:
        """The keys whose versions are counted one by one, because one is missing or repeated: for the last pass."""
        return {key for key, found in self._versions.items() if not found.is_complete}

    def count_missing(self, bucket: _Bucket, counted: Counted) -> None:
        """Count the events of the outbox that are not on the topic, or that break the contract there."""
        refused: dict[bytes, Refused] = {}
        for event_id, record in bucket.refused:
            if len(event_id) == EVENT_ID_BYTES and refused.setdefault(event_id, record) is record:
                self._refused_keys[record.key] += record.key in self._unclear
        for event_id, row in bucket.written:
            if event_id in bucket.firsts or self.point.has(row.key, row.version):
                continue
            if event_id in refused or event_id in self._acknowledged:
                self._count_refused(event_id, row, refused.get(event_id))
                continue
            self._count_unrelayed(event_id, row)
        if self._unclear:
            self._count_versions(bucket, counted)

    def _count_refused(self, event_id: bytes, row: Written, refused: Refused | None) -> None:
        """An event whose record breaks the contract, or was discarded and is on the topic no more."""
        for tally in self._tallies:
            if refused is None:
                tally.add(event_id, row, None, "aged out")
            else:
                tally.add(event_id, row, refused.place, is_refused=True)

    def _count_unrelayed(self, event_id: bytes, row: Written) -> None:
        fate = self._fate(row)
        kind = row.kind
        counts = self._counts[kind] if kind is not None else self.report.events.setdefault(UNDECLARED, EventCounts())
        if fate == "lost":
            counts.lost += 1
            self.report.lost.append(str(uuid.UUID(bytes=event_id)))
        elif fate == "in flight":
            counts.in_flight += 1
        for tally in self._tallies:
            tally.add(event_id, row, None, fate)

    def _fate(self, row: Written) -> Fate:
        known = self._versions.get(row.key)
        if not self._log.is_whole and self._is_dropped(row):
            return "aged out"
        if row.version is None:
            return "lost" if row.occurred_ms + LATE_MS < self._latest_ms else "in flight"
        return "lost" if known and row.version < known.highest else "in flight"

    def _is_dropped(self, row: Written) -> bool:
        """Whether a topic that is not whole has dropped an event, as far as its key or its time tells."""
        if row.version is not None:
            if known := self._versions.get(row.key):
                return row.version < known.lowest
            if any(state.versions.get(self.topic.name) for state in self._states):
                return row.version <= self._applied(row.key)
        return row.occurred_ms <= self._log.dropped_until_ms

    def _applied(self, key: str) -> int:
        """The highest version of a key that any sink has."""
        return max((state.versions.get(self.topic.name, {}).get(key, 0) for state in self._states), default=0)

    def _count_versions(self, bucket: _Bucket, counted: Counted) -> None:
        written = dict(bucket.written)
        for event_id, event in bucket.firsts.items():
            if event.version is None or event.key not in self._unclear:
                continue
            if event_id in written or not self._is_foreign(event_id, event):
                counted.add(Numbered(self.topic.number, event.key, event.version, event_id))

    def add_version(self, one: versions.Repeated) -> None:
        """Count a version of an unclear key, and whether different events have it."""
        self._distinct[one.key] += 1
        if len(one.event_ids) > 1:
            self.report.repeated_versions += 1
            self.report.first_repeated = min(self.report.first_repeated or str(one), str(one))

    def finish(self) -> None:
        """Count the versions that no event on the topic has. Each record that breaks the contract explains one."""
        self.report.lost.sort()  # the oldest first: UUIDv7s sort by time
        self.report.spread_keys = len(self._spread)
        if self._spread:
            key, found_on = min(self._spread.items())
            self.report.first_spread = f"key {key}, partitions {', '.join(map(str, sorted(found_on)))}"
        gaps: dict[str, int] = {}
        for key in self._unclear:
            found, before = self._versions[key], self.point.versions.get(key)
            distinct = self._distinct[key] + (before[1] - before[0] + 1 if before else 0)
            missing = found.highest - found.lowest + 1 - distinct - self._refused_keys[key]
            if missing > 0:
                gaps[key] = missing
        self.report.missing_versions = sum(gaps.values())
        if gaps:
            worst = max(gaps, key=lambda key: (gaps[key], key))
            self.report.most_missing = f"key {worst}, {gaps[worst]}"

    def letters(self, before: Mapping[int, int]) -> dict[str, bytes]:
        """By sink, its letters of records before these offsets."""
        return {state.name: letters.digest(state.letters, self.topic.name, before) for state in self._states}

    def without_numbers(self) -> set[bytes]:
        """The events with a dead letter that does not say their numbers: they are of an older version."""
        return {
            event_id
            for state in self._states
            for event_id, letter in state.letters.items()
            if letter.topic == self.topic.name and None in letter.numbers
        }

    def next_offsets(self) -> dict[int, int]:
        """The offsets up to which all sinks have applied the topic."""
        positions = [state.positions.get(self.topic.name, {}) for state in self._states]
        return {
            partition: min([offset, *(one.get(partition, 0) for one in positions)])
            for partition, offset in self._log.next_offsets.items()
        }


class _Advance:
    """Finds the point up to which all sinks have applied a topic, after a comparison that has found nothing wrong."""

    def __init__(self, comparison: _TopicComparison, seen: Observed) -> None:
        self._point, self._report = comparison.point, comparison.report
        self._kinds = seen.declared.kinds
        self._topic_id = seen.logs.ends[comparison.topic.number].topic_id or ""
        self._next_offsets = comparison.next_offsets()
        self._letters = comparison.letters(self._next_offsets)
        self._partitions = comparison.partitions
        self._without_numbers, self._numbers = comparison.without_numbers(), dict(self._point.numbers)
        self._versions: dict[str, list[int]] = {key: list(one) for key, one in self._point.versions.items()}
        self._records, self._acknowledged = self._point.records, self._point.acknowledged
        self._events = {name: [before.delivered, before.duplicates] for name, before in self._point.events.items()}
        self._open_ms = seen.source.read_at_ms

    def add(self, bucket: _Bucket) -> None:
        """Count what is before the point."""
        known: set[bytes] = set()
        for event_id, event in bucket.delivered:
            if event.offset < self._next_offsets[event.partition]:
                counts = self._events.setdefault(self._kinds[event.kind].event, [0, 0])
                self._records += 1
                counts[0] += 1
                counts[1] += event_id in known
                known.add(event_id)
                if event_id in self._without_numbers:
                    self._numbers.setdefault(event_id.hex(), tuple(map(Decimal, event.numbers)))
                if event.version is not None:
                    found = self._versions.setdefault(event.key, [event.version, event.version])
                    found[:] = min(found[0], event.version), max(found[1], event.version)
        for event_id, refused in bucket.refused:
            if refused.offset < self._next_offsets[refused.partition]:
                self._records += 1
                self._acknowledged += 1
                known.add(event_id)
        for event_id, row in bucket.written:
            if event_id not in known and not self._point.has(row.key, row.version):
                self._open_ms = min(self._open_ms, row.occurred_ms)

    def point(self) -> TopicPoint:
        """The point."""
        pruned = {name: counts.pruned for name, counts in self._report.events.items()}
        return TopicPoint(
            topic_id=self._topic_id,
            next_offsets=self._next_offsets,
            records=self._records,
            acknowledged=self._acknowledged,
            events={
                name: EventsBefore(delivered, duplicates, pruned.get(name, 0))
                for name, (delivered, duplicates) in self._events.items()
            },
            versions={key: (lowest, highest) for key, (lowest, highest) in self._versions.items()},
            partitions=self._partitions,
            since_ms=self._open_ms - LATE_MS,
            letters=self._letters,
            numbers=self._numbers,
        )


class _Comparison:
    """The comparison of all topics and sinks of events."""

    def __init__(self, seen: Observed, outbox: Buckets[Written], verified: Verified) -> None:
        self._seen, self._outbox = seen, outbox
        of_events = [state for state in seen.sinks.states if state.carries == "events"]
        of_states = [state for state in seen.sinks.states if state.carries == "states"]
        numbers = {name: point.numbers for name, point in verified.topics.items()}
        self._tallies = [Tally(state, seen.declared, seen.source, numbers) for state in of_events]
        self._topics = [
            _TopicComparison(seen, topic, self._tallies, verified.topic(topic.name)) for topic in seen.declared.topics
        ]
        self.report = Report(
            topics=[topic.report for topic in self._topics],
            sinks=[
                *(tally.report for tally in self._tallies),
                *(compare_states(seen.declared, seen.source, state) for state in of_states),
            ],
            uncompared_tables=list(seen.sinks.uncompared_tables),
        )

    def run(self, progress: Callable[[str], None]) -> None:
        """Fill the report."""
        with closing(Counted(self._seen.logs.salt)) as counted:
            passes: list[Callable[[_TopicComparison, _Bucket], None]] = [
                _TopicComparison.match,
                _TopicComparison.count_delivered,
                lambda topic, bucket: topic.count_missing(bucket, counted),
            ]
            for done, (count, number) in enumerate(product(passes, range(buckets.COUNT)), start=1):
                for topic, bucket in self._buckets(number):
                    count(topic, bucket)
                progress(f"compared {100 * done // (len(passes) * buckets.COUNT)} %")
            for one in counted.all():
                self._topics[one.topic].add_version(one)
        for topic in self._topics:
            topic.finish()
        for tally in self._tallies:
            tally.compare()

    def _buckets(self, bucket: int) -> Iterator[tuple[_TopicComparison, _Bucket]]:
        """The rows of a bucket by topic, as far as there are any."""
        found: dict[int, _Bucket] = defaultdict(_Bucket)
        for event_id, event in self._seen.logs.delivered.rows(bucket):
            of_topic = found[event.topic]
            of_topic.delivered.append((event_id, event))
            first = of_topic.firsts.setdefault(event_id, event)
            # Records are read in batches, and within a batch by kind: one of another kind may stand before.
            if first.partition == event.partition and event.offset < first.offset:
                of_topic.firsts[event_id] = event
        for event_id, refused in self._seen.logs.refused.rows(bucket):
            found[refused.topic].refused.append((event_id, refused))
        for event_id, row in self._outbox.rows(bucket):
            found[row.topic].written.append((event_id, row))
        for number, of_topic in found.items():
            yield self._topics[number], of_topic

    def verified(self, of: str) -> Verified:
        """The point up to which all sinks have applied the topics. Call it if nothing was found wrong."""
        points = {
            topic.topic.name: _Advance(topic, self._seen)
            for topic in self._topics
            if topic.topic.decoder.version is not None and topic.topic.name in self._seen.source.versions
        }
        for bucket in range(buckets.COUNT):
            for topic, of_topic in self._buckets(bucket):
                if topic.topic.name in points:
                    points[topic.topic.name].add(of_topic)
        return Verified(of, {name: point.point() for name, point in points.items()})


def compare(seen: Observed, progress: Callable[[str], None], verified: Verified | None = None) -> Report:
    """Compare the source with the topics and the sinks.

    Its memory grows with the number of keys, and not with the number of events. With ``verified`` the report says up to
    where everything is verified. If source and logs begin at that point, it may raise Doubt.
    """
    with closing(Buckets(Written, seen.logs.salt)) as outbox:
        for event_id, row in seen.source.events:
            outbox.add(event_id, row)
        comparison = _Comparison(seen, outbox, verified or Verified())
        comparison.run(progress)
        if verified is not None and not comparison.report.findings:
            comparison.report.verified = comparison.verified(verified.of)
        return comparison.report


def compare_states(declared: Declared, source: Source, state: SinkState) -> SinkReport:
    """Compare the source with a sink of states that was read before it.

    A key with the source's version must have its total. A key that is behind is in flight, by as many versions: its
    total says nothing yet. So is a key whose change is lost or set aside, until the next change makes up for it. A key
    that the source does not have must have the total 0.
    """
    report = SinkReport(
        state.name,
        parked=sum(letter.is_open for letter in state.letters.values()),
        discarded=state.discarded,
        duplicates=state.duplicates,
        filtered=state.filtered,
        not_compared=state.not_compared,
    )
    for comparison in () if state.not_compared else declared.comparisons_of(state.name):
        of_source, of_sink = source.totals[comparison.id], state.totals[comparison.id]
        compared = ComparisonReport(comparison.name, of_source.totals)
        report.comparisons.append(compared)
        if not of_source.has_version or not of_sink.has_version:
            compared.not_compared = NO_VERSIONS
            continue
        behind = _compare_states(of_source, of_sink, compared.drift)
        report.in_flight = max(report.in_flight, behind)
    return report


def _compare_states(source: Totals, sink: Totals, drift: dict[str, Decimal]) -> int:
    """By how many versions the sink is behind. Differences of the other keys become drift."""
    in_flight = 0
    for key in source.totals.keys() | sink.totals.keys():
        # A key begins with version 0, and that is a change too.
        behind = source.versions.get(key, 0) - sink.versions.get(key, -1)
        difference = EXACT.subtract(sink.totals.get(key, Decimal(0)), source.totals.get(key, Decimal(0)))
        if key in source.totals and behind > 0:
            in_flight += behind
        elif difference:
            drift[key] = difference
    return in_flight


def _reads(declared: Declared, state: SinkState, topic: EventTopic) -> bool:
    """Whether something is expected of a sink on a topic."""
    spec = declared.sink(state.name) if state.is_declared and state.carries == "events" else None
    return spec is not None and topic.name in spec.decoders


def _made_at_ms(event_id: bytes) -> int:
    """The time inside a UUIDv7, in milliseconds since 1970; 0 for another UUID."""
    return int.from_bytes(event_id[:6]) if event_id[6] >> 4 == UUID_V7 else 0
