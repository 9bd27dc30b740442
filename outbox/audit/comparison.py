"""Compare source, topic and sinks: pure, on what was read before.

Which events count
    A record that breaks the contract counts in no drift, gap or loss. If it is an event of the outbox, nobody knows
    what it should have added. So its key is *uncertain*, and not compared, for every sink that has set it aside or not
    read it yet.

In flight or lost
    The relay keeps the order of commits. An event of the outbox that is not on the topic is lost if a later event of
    its key is there: one with a higher version. Events without versions are compared by time: a lost one is more than
    `LATE_MS` older than another event that was relayed. Other missing events are in flight, unless they are so old that
    the topic has dropped them.

Foreign or pruned
    An event on the topic that the outbox does not have was deleted by `outbox prune`, or never was there. It is
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
from collections.abc import Callable, Sequence
from contextlib import closing
from decimal import Decimal
from itertools import product
from typing import Literal

from outbox.audit import buckets
from outbox.audit.buckets import Buckets
from outbox.audit.report import Report, SinkReport
from outbox.audit.sinks import SinkState
from outbox.audit.source import LATE_MS, Source, Written
from outbox.audit.topic_log import TopicLog, add_version
from outbox.audit.topic_part import EXACT, Delivered, TopicOffset
from outbox.audit.verified import Doubt, Verified, advance

CLOCK_MARGIN_MS = 1_000  # between the time inside a UUIDv7 and occurred_at of the same row

Fate = Literal["relayed", "in flight", "lost", "aged out"]
UUID_V7 = 7
NO_STATES = "the source has no view source_totals with columns total and version"
NO_TOTALS = "the source has no view source_totals with a column total"


class _Tally:
    """Counts the events that one sink has not applied."""

    def __init__(self, state: SinkState, not_compared: str) -> None:
        self.state = state
        self.report = SinkReport(
            state.name, duplicates=state.duplicates, not_compared=state.not_compared or not_compared
        )
        self._unapplied: dict[str, Decimal] = defaultdict(Decimal)

    def add(
        self, event_id: bytes, event: Written | Delivered, place: TopicOffset | None, fate: Fate = "relayed"
    ) -> None:
        """Count an event that the source's totals contain."""
        if self.classify(event_id, event, place, fate):
            return
        if event.quantity is None:
            self.report.uncertain.add(event.key)
        else:
            self._unapplied[event.key] = EXACT.add(self._unapplied[event.key], event.quantity)

    def classify(
        self, event_id: bytes, event: Written | Delivered, place: TopicOffset | None, fate: Fate = "relayed"
    ) -> bool:
        """Count an event as parked, lost or in flight unless the sink has applied it; True if its totals have it."""
        state, version = self.state, event.version
        if version is not None and version <= state.bases.get(event.key, 0):
            return True
        if state.is_parked(event_id, place):
            self.report.parked += 1
            text = str(uuid.UUID(bytes=event_id))
            self.report.first_parked = min(self.report.first_parked or text, text)  # the oldest
        elif state.has_seen(place) or fate == "aged out":
            return True
        elif fate == "lost":
            self.report.lost += 1
        else:
            self.report.in_flight += 1
        # A later state makes up for an event that was not applied.
        return state.takes_states and version is not None and version <= state.versions.get(event.key, 0)

    def compare(self, source: Source) -> None:
        """Compare the totals of each key."""
        if self.report.not_compared or source.totals is None:
            return
        for key in source.totals.keys() | self.state.totals.keys():
            if key not in self.report.uncertain:
                due = EXACT.subtract(source.totals.get(key, Decimal(0)), self._unapplied.get(key, Decimal(0)))
                difference = EXACT.subtract(self.state.totals.get(key, Decimal(0)), due)
                if difference:
                    self.report.drift[key] = difference


class _Comparison:
    """One comparison: three passes over the buckets of events, because what a pass finds decides in the next one."""

    def __init__(
        self,
        source: Source,
        log: TopicLog,
        outbox: Buckets[Written],
        states: Sequence[SinkState],
        *,
        topic: str,
        verified: Verified,
    ) -> None:
        self._source, self._log, self._outbox = source, log, outbox
        self._verified = verified
        self._tallies = [_Tally(state, NO_TOTALS if source.totals is None else "") for state in states]
        self._earliest: dict[int, tuple[int, int]] = {}  # by partition, offset and time of the outbox's first event
        self._latest_ms = 0  # the time of the outbox's latest event that is on the topic
        # By key, of the events on the topic that are not foreign.
        self._versions = verified.counted_versions()
        self.report = Report(
            topic=topic,
            totals=source.totals or {},
            outbox_events=source.events_before,
            records=verified.records + log.records,
            verified_before=verified.records,
            duplicates=verified.duplicates,
            pruned=verified.pruned,
            malformed=log.malformed,
            sinks=[tally.report for tally in self._tallies],
        )

    def run(self, progress: Callable[[str], None]) -> None:
        """Fill the report."""
        steps = (self._match, self._count_delivered, self._count_missing)
        for done, (step, bucket) in enumerate(product(steps, range(buckets.COUNT)), start=1):
            step(bucket)
            progress(f"compared {100 * done // (len(steps) * buckets.COUNT)} %")
        self.report.lost.sort()  # the oldest first: UUIDv7s sort by time
        self._count_gaps()
        for tally in self._tallies:
            tally.compare(self._source)

    def _match(self, bucket: int) -> None:
        """Count duplicates, and note which events of the outbox are on the topic."""
        delivered: dict[bytes, Delivered] = {}
        repeated = self.report.repeated
        for event_id, event in self._log.delivered.rows(bucket):
            if delivered.setdefault(event_id, event) is not event:
                self.report.duplicates += 1
                repeated[event.key] = EXACT.add(repeated.get(event.key, Decimal(0)), event.quantity)
        for event_id, row in self._outbox.rows(bucket):
            self.report.outbox_events += 1
            if event_id in delivered:
                self._note(delivered[event_id].place, row.occurred_ms)

    def _note(self, place: TopicOffset, occurred_ms: int) -> None:
        known = self._earliest.get(place.partition)
        if known is None or place.offset < known[0]:
            self._earliest[place.partition] = place.offset, occurred_ms
        self._latest_ms = max(self._latest_ms, occurred_ms)

    def _count_delivered(self, bucket: int) -> None:
        """Count the events on the topic. Those that the outbox does not have are foreign or pruned."""
        written = self._outbox.firsts(bucket)
        for event_id, event in self._log.delivered.firsts(bucket).items():
            if not self._verified.is_beginning:
                self._require_usual(event, is_written=event_id in written)
            is_foreign = event_id not in written and self._is_foreign(event_id, event)
            if is_foreign:
                text = f"{uuid.UUID(bytes=event_id)} at {event.place}, key {event.key}"
                self.report.foreign.add(text, event.quantity)
            else:
                self.report.pruned += event_id not in written
                add_version(self._versions, event)
            for tally in self._tallies:
                (tally.classify if is_foreign else tally.add)(event_id, event, event.place)

    def _require_usual(self, event: Delivered, *, is_written: bool) -> None:
        if not is_written:
            raise Doubt(f"an event at {event.place} is not in the outbox")
        if self._verified.has(event.key, event.version):
            raise Doubt(f"the event at {event.place} repeats a version that was verified")

    def _is_foreign(self, event_id: bytes, event: Delivered) -> bool:
        known = (self._source.versions or {}).get(event.key)
        if known is not None and event.version is not None and event.version > known:
            return True
        # The outbox has an older event that stands before this one: so prune has not deleted this one.
        offset, occurred_ms = self._earliest.get(event.partition, (event.offset, 0))
        return offset < event.offset and occurred_ms + CLOCK_MARGIN_MS < _made_at_ms(event_id)

    def _count_missing(self, bucket: int) -> None:
        """Count the events of the outbox that are not on the topic, or that break the contract there."""
        delivered = self._log.delivered.firsts(bucket)
        refused = self._log.refused.firsts(bucket)
        for event_id, row in self._outbox.rows(bucket):
            if event_id in delivered or self._verified.has(row.key, row.version):
                continue
            if event_id in refused:
                for tally in self._tallies:
                    tally.add(event_id, row._replace(quantity=None), refused[event_id].place)
                continue
            fate = self._fate(row)
            if fate == "lost":
                self.report.lost.append(str(uuid.UUID(bytes=event_id)))
            elif fate == "in flight":
                self.report.in_flight += 1
            for tally in self._tallies:
                tally.add(event_id, row, None, fate)

    def _fate(self, row: Written) -> Fate:
        log, known = self._log, self._versions.get(row.key)
        if row.version is None:
            if row.occurred_ms <= log.dropped_until_ms:
                return "aged out"
            return "lost" if row.occurred_ms + LATE_MS < self._latest_ms else "in flight"
        if not log.is_whole and (row.version < known.lowest if known else row.version <= self._applied(row.key)):
            return "aged out"
        return "lost" if known and row.version < known.highest else "in flight"

    def _applied(self, key: str) -> int:
        """The highest version of a key that any sink has."""
        return max((tally.state.versions.get(key, 0) for tally in self._tallies), default=0)

    def _count_gaps(self) -> None:
        """Count the versions that no event on the topic has. Each record that breaks the contract explains one."""
        refused = Counter(
            one.key
            for bucket in range(buckets.COUNT)
            for one in self._log.refused.firsts(bucket).values()
            if one.key in self._versions
        )
        missing = {key: found.missing - refused[key] for key, found in self._versions.items()}
        gaps = {key: count for key, count in missing.items() if count > 0}
        self.report.missing_versions = sum(gaps.values())
        if gaps:
            worst = max(gaps, key=lambda key: gaps[key])
            self.report.most_missing = f"key {worst}, {gaps[worst]}"


def compare(
    source: Source,
    log: TopicLog,
    states: Sequence[SinkState],
    progress: Callable[[str], None],
    *,
    topic: str,
    verified: Verified | None = None,
) -> Report:
    """Compare the source with a topic and with sinks of events. Sinks were read first, and the source last.

    Its memory grows with the number of keys, and not with the number of events. If source and log begin at a verified
    point, it may raise Doubt.
    """
    since = verified or Verified()
    since.require_usual(states, source.versions)
    with closing(Buckets(Written, log.salt)) as outbox:
        for row in source.events:
            outbox.add(row.event_id, row)
        comparison = _Comparison(source, log, outbox, states, topic=topic, verified=since)
        comparison.run(progress)
        report = comparison.report
        if verified is not None and source.versions is not None and not report.findings:
            report.verified = advance(verified, log, outbox, states, pruned=report.pruned, read_at_ms=source.read_at_ms)
    return report


def compare_states(source: Source, states: Sequence[SinkState]) -> list[SinkReport]:
    """Compare the source with sinks of states that were read before it.

    A key with the source's version must have its total. A key that is behind is in flight, by as many versions: its
    total says nothing yet. So is a key whose change is lost or set aside, until the next change makes up for it. A key
    that the source does not have must have the total 0.
    """
    reports = []
    for state in states:
        report = SinkReport(
            state.name, parked=len(state.parked), duplicates=state.duplicates, not_compared=state.not_compared
        )
        reports.append(report)
        if source.totals is None or source.versions is None:
            report.not_compared = report.not_compared or NO_STATES
        if report.not_compared or source.totals is None or source.versions is None:
            continue
        for key in source.totals.keys() | state.totals.keys():
            # A key begins with version 0, and that is a change too.
            behind = source.versions.get(key, 0) - state.versions.get(key, -1)
            if key in source.totals and behind > 0:
                report.in_flight += behind
            elif difference := EXACT.subtract(state.totals[key], source.totals.get(key, Decimal(0))):
                report.drift[key] = difference
    return reports


def _made_at_ms(event_id: bytes) -> int:
    """The time inside a UUIDv7, in milliseconds since 1970; 0 for another UUID."""
    return int.from_bytes(event_id[:6]) if event_id[6] >> 4 == UUID_V7 else 0
