"""Compare source, topics and sinks: duplicates, losses, gaps, drift, events in flight and events set aside.

It is sound beside running writers and sinks because of the order of its reading: all sinks, with their totals and
positions, in one snapshot; then all topics up to their last stable offsets; then the source in one snapshot. So every
applied event is in the part of its topic that was read, and every event of a topic is in the source that was read,
unless it was pruned. The difference is in flight, and is subtracted exactly.

The catalog (`outbox.events.catalog`) declares the events. All of them are decoded, so a record that nobody has declared
breaks the contract. The view ``source`` of an aggregate says the version of each key; without it no foreign event is
recognised by its version. The comparisons of a sink (`outbox.sink.comparison_files`) say which totals and rows are
compared.

`outbox.audit.comparison` defines when a missing event is in flight or lost, and an unknown one foreign or pruned.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace

from outbox.audit import rows, sinks, source, verified
from outbox.audit.comparison import Observed, compare
from outbox.audit.declared import EventTopic, load
from outbox.audit.report import Report
from outbox.audit.store import TopicLogs
from outbox.audit.verified import Doubt, Verified
from outbox.base.settings import Settings
from outbox.base.terminal import Progress
from outbox.base.wait import WaitTimeoutError, nothing, timeout_scale, wait_for
from outbox.kafka import topics

POLL_S = 0.5


class InFlightError(WaitTimeoutError):
    """Events were still in flight at the deadline. ``report`` is the last comparison."""

    def __init__(self, waited_s: float, report: Report) -> None:
        super().__init__(
            f"after {waited_s:.0f} s events are in flight: {report.in_flight_text}",
            "`outbox doctor` finds what does not run",
            code="events-in-flight",
        )
        self.report = report


def check(settings: Settings, *, incremental: bool = False, progress: Progress = lambda _: None) -> Report:
    """Compare now. Raises Failure if a database or Kafka is unavailable, or if nothing is declared.

    ``incremental`` reads what came since the last such check that found no problem. Without such a check, or in doubt,
    it reads everything: see `outbox.audit.verified`. ``progress`` receives many lines that say how far it is.
    """
    with closing(Check(settings, incremental=incremental, progress=progress)) as one:
        return one.compare()


def check_settled(
    settings: Settings,
    timeout_s: float,
    *,
    incremental: bool = False,
    progress: Progress = lambda _: None,
    needs: Callable[[], None] = nothing,
) -> Report:
    """Compare until nothing is in flight, or an event is lost. Raises InFlightError after ``timeout_s``.

    Records are read once. After a comparison it rests for as long as that took. ``needs`` raises if a process has ended
    that the events in flight need. ``progress`` receives how far the first comparison is, and then what is in flight.
    """
    latest: list[Report] = []
    rests_until = 0.0
    with closing(Check(settings, incremental=incremental, progress=progress)) as one:

        def settled() -> bool:
            nonlocal rests_until
            began = time.monotonic()
            if began < rests_until:
                return False
            latest[:] = [one.compare()]
            one.progress = lambda _: None  # of the first comparison alone: each of the others would show the same again
            progress(f"in flight: {latest[0].in_flight_text}")
            rests_until = 2 * time.monotonic() - began
            return latest[0].settled or bool(latest[0].lost)

        try:
            wait_for("no event to be in flight", settled, timeout_s=timeout_s, poll_s=POLL_S, needs=needs)
        except WaitTimeoutError:
            raise InFlightError(timeout_s * timeout_scale(), latest[0]) from None
    return latest[0]


class Check:
    """A check, which may compare again and again: the topics are read on from where that stopped."""

    def __init__(self, settings: Settings, *, incremental: bool, progress: Progress) -> None:
        self._settings = settings
        self.progress = progress
        self._declared = rows.described(settings, load(settings))
        self._is_incremental = incremental
        self._doubt = ""
        self._begin(verified.load(settings, self._declared) if incremental else Verified())

    def close(self) -> None:
        """Delete its temporary files."""
        self._logs.close()

    def compare(self) -> Report:
        """Compare now."""
        report = self._compare_since() or self._compare()
        if self._doubt:
            report.notes.append(f"everything was read: {self._doubt}")
        if report.verified is not None:
            verified.store(self._settings, report.verified)
        return report

    def _compare_since(self) -> Report | None:
        """Compare what came since the verified point; None without such a point, or in doubt: then read everything."""
        if self._verified.is_beginning:
            return None
        try:
            report = self._compare()
            self._doubt = str(report.findings[0]) if report.findings else ""
        except Doubt as doubt:
            self._doubt = str(doubt)
        if not self._doubt:
            report.notes.append("read and counted: what came since the last incremental check")
            return report
        self.close()
        self._begin(Verified(self._verified.of))
        return None

    def _begin(self, at: Verified) -> None:
        """Begin at a verified point, unless one of its topics was recreated since."""
        if any(topics.describe(self._settings, name).id != point.topic_id for name, point in at.topics.items()):
            at = Verified(at.of)
        self._verified = at
        self._logs = TopicLogs(self._declared.topics, at.ends)

    def _compare(self) -> Report:
        settings, declared = self._settings, self._declared
        of_sinks = sinks.read(settings, declared, self._logs.store)
        self._logs.read_on(settings, self.progress)
        with source.read(settings, declared, self._logs.store, self._verified.since_ms) as read:
            # Only now: a key is marked as erased before its rows leave the source.
            of_sinks = replace(of_sinks, erased=sinks.erased(settings))
            since = self._verified if self._is_incremental else None
            report = compare(Observed(declared, of_sinks, self._logs, read), self.progress, since)
            report.notes += read.notes
        for topic in declared.topics:
            report.notes += _topic_notes(topic)
        return report


def _topic_notes(topic: EventTopic) -> Iterator[str]:
    if topic.decoder.version is None:
        yield (
            f"topic {topic.name}: events have no version: no gap is looked for, a lost event is recognised by its age,"
            " and an incremental check reads everything"
        )
    elif not topic.sources:
        lacking = ", ".join(aggregate.name for aggregate in topic.aggregates if aggregate.source is None)
        yield (
            f"topic {topic.name}: no view says the versions in the source (`source` in aggregate.toml of {lacking}):"
            " an incremental check reads everything of it"
        )
