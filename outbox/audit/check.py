"""Compare source, topic and sinks: duplicates, losses, gaps, drift, events in flight and events set aside.

It is sound beside running writers and sinks because of the order of its reading: each sink's totals with its positions
in one snapshot, then the topic up to its last stable offset, then the source in one snapshot. So every applied event is
in the part of the topic that was read, and every event of the topic is in the source that was read, unless it was
pruned. The difference is in flight, and is subtracted exactly.

The job that reads the project's topic declares what an event looks like: its decoder validates every record, and names
key, version and quantity. Without a version no gap is looked for. Without a quantity no total is compared. The totals
are two views of the domain, both optional: ``source_totals`` (key, total, version) in the source database, and
``sink_totals`` (sink, key, total, version) in the sink database.

`outbox.audit.comparison` defines when a missing event is in flight or lost, and an unknown one foreign or pruned.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing

from outbox.audit import sinks, source, verified
from outbox.audit.comparison import NO_TOTALS, compare, compare_states
from outbox.audit.report import Report
from outbox.audit.topic_log import TopicLog
from outbox.audit.verified import Doubt, Verified
from outbox.base.errors import Failure
from outbox.base.settings import Settings
from outbox.base.wait import wait_for
from outbox.kafka import topics
from outbox.sink import spec
from outbox.sink.records import RecordDecoder

POLL_S = 0.5


def _ignore(_: str) -> None:
    """Show no progress."""


def check(settings: Settings, *, incremental: bool = False, progress: Callable[[str], None] = _ignore) -> Report:
    """Compare now. Raises Failure if a database or Kafka is unavailable, or if no job declares the events.

    ``incremental`` reads what came since the last such check that found no problem, and everything if there is none or
    in doubt: see `outbox.audit.verified`. ``progress`` receives many lines that say how far it is.
    """
    with closing(Check(settings, incremental=incremental, progress=progress)) as one:
        return one.compare()


def check_settled(
    settings: Settings, timeout_s: float, *, incremental: bool = False, progress: Callable[[str], None] = _ignore
) -> Report:
    """Compare until nothing is in flight, or an event is lost. Raises WaitTimeoutError after ``timeout_s``.

    Records are read once. After a comparison it rests for as long as that took.
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
            rests_until = 2 * time.monotonic() - began
            return latest[0].settled or bool(latest[0].lost)

        wait_for("no event to be in flight", settled, timeout_s=timeout_s, poll_s=POLL_S)
    return latest[0]


class Check:
    """A check, which may compare again and again: the log of the topic is read on from where it stopped."""

    def __init__(self, settings: Settings, *, incremental: bool, progress: Callable[[str], None]) -> None:
        self._settings = settings
        self._progress = progress
        self._decoder = event_decoder(settings)
        self._is_incremental = incremental
        self._doubt = ""
        self._begin(verified.load(settings, self._decoder) if incremental else Verified())

    def close(self) -> None:
        """Delete its temporary files."""
        self._log.close()

    def compare(self) -> Report:
        """Compare now."""
        report = self._compare_since() or self._compare()
        if self._doubt:
            report.notes.append(f"everything was read: {self._doubt}")
        if report.verified is not None:
            verified.store(self._settings, report.verified)
        return report

    def _compare_since(self) -> Report | None:
        """Compare what came since the verified point; None if there is none, or in doubt: then read everything."""
        if self._verified.is_beginning:
            return None
        try:
            report = self._compare()
            self._doubt = str(report.findings[0]) if report.findings else ""
        except Doubt as doubt:
            self._doubt = str(doubt)
        if not self._doubt:
            return report
        self.close()
        self._begin(Verified(self._verified.of))
        return None

    def _begin(self, at: Verified) -> None:
        if at.topic_id and at.topic_id != topics.describe(self._settings, self._settings.topic).id:
            at = Verified(at.of)
        self._verified = at
        self._log = TopicLog(self._decoder, at.topic_id or None, at.next_offsets)

    def _compare(self) -> Report:
        settings, decoder = self._settings, self._decoder
        states = sinks.read(settings)
        self._log.read_on(settings, self._progress)
        if self._log.has_gap and not self._verified.is_beginning:
            raise Doubt("the topic has dropped records that were not read")
        of_events = [state for state in states if state.carries == "events"]
        with source.read(settings, decoder, self._verified.since_ms) as read:
            since = self._verified if self._is_incremental and decoder.version is not None else None
            report = compare(read, self._log, of_events, self._progress, topic=settings.topic, verified=since)
            report.sinks += compare_states(read, [state for state in states if state.carries == "states"])
            report.notes += _notes(decoder, read)
        if report.findings:
            report.verified = None  # also of sinks of states
        return report


def event_decoder(settings: Settings) -> RecordDecoder:
    """The declaration of the events on the project's topic. Of several jobs, one that has a quantity.

    Raises Failure if no job reads the topic, or if jobs disagree on the key or the version.
    """
    decoders = [job.decoder for job in spec.jobs(settings) if job.topic == settings.topic and job.carries == "events"]
    if not decoders:
        raise Failure(
            f"no sink job declares the events of topic {settings.topic}: nothing can be compared",
            "add a job (docs/adopting.md), or correct OUTBOX_TOPIC",
            code="event-undeclared",
        )
    if len({(decoder.key, decoder.version) for decoder in decoders}) > 1:
        raise Failure(
            f"the sink jobs of topic {settings.topic} disagree on the events' key or version",
            "declare the same in each",
            code="event-ambiguous",
        )
    return next((decoder for decoder in decoders if decoder.quantity is not None), decoders[0])


def _notes(decoder: RecordDecoder, read: source.Source) -> list[str]:
    """What is not compared."""
    notes = []
    if decoder.version is None:
        notes.append(
            "events have no version: no gap is looked for, a lost event is recognised by its age,"
            " and an incremental check reads everything"
        )
    if decoder.quantity is None:
        notes.append("events have no quantity: totals are not compared")
    elif read.totals is None:
        notes.append(f"{NO_TOTALS}: totals are not compared")
    return notes
