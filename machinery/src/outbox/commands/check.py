"""outbox check: compare source, topics and sinks."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import click
import msgspec

from outbox.audit.quantity import text_of
from outbox.base.errors import Failure, plural
from outbox.base.settings import load

if TYPE_CHECKING:
    from outbox.audit.report import ComparisonReport, Report, SinkReport, TopicReport

WORST_SHOWN = 5
REASONS_SHOWN = 5
LABEL_WIDTH_MIN = 12
PROGRESS_S = 10.0

Line = tuple[str, str]  # a label, and what is said about it


@click.command("check")
@click.option("--wait", "wait_s", type=float, help="Wait up to this many seconds until no event is in flight.")
@click.option("--incremental", is_flag=True, help="Read what came since the last such check that found no problem.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for a script.")
def check_command(wait_s: float | None, incremental: bool, as_json: bool) -> None:
    """Compare the source, the topics and every sink. Status 1 if a problem is found.

    Problems are lost and foreign events, missing and repeated versions, keys on several partitions, records that break
    the contract, drift, rows that differ, and events that a sink has set aside. Duplicates on a topic are not problems,
    and neither are events that were discarded with a reason. The command works beside running writers and sinks: it
    counts events in flight separately.

    Files in the folder `comparisons` of a sink say which totals and rows are compared. Tables that no comparison reads
    are named.

    If --wait ends while events are in flight, the report shows where they are, with status 1.

    With --incremental it can run every few minutes on large topics. In any doubt it reads everything.

    \b
    The keys of --json are stable:
      topics   name, outbox_events, records, verified_before, duplicates, in_flight, pruned, missing_versions,
               repeated_versions, spread_keys, and
                 lost       ids of the events that are in the outbox and that the topic has skipped
                 malformed  count, first, reasons (by kind), acknowledged: records that break the contract
                 foreign    count, first, worst: valid events that never were in the outbox
                 events     by name: delivered, duplicates, in_flight, lost, foreign, pruned
      total    the numbers of all topics added up
      sinks    name, in_flight, lost, parked (all that it has set aside), duplicates, filtered (by its transform),
               not_compared, and
                 comparisons  name, keys, drift (by key), drift_total, uncertain_keys, not_compared, differing_keys, and
                   differences  the 20 worst rows: key, row (differs, missing or surplus in the sink), columns (by name:
                                source, sink; the beginning of a value above 200 characters)
      uncompared_tables  tables with rows per sink that no comparison reads
      acknowledged       sink, count, reasons (by text): dead letters that were discarded
      notes              what is not compared, and why
      settled            whether nothing is in flight
      findings           code, message, count, first, worst, topic, sink, comparison; null or "" if absent
    """
    from outbox.audit import check

    settings = load()
    gc.freeze()  # what is imported stays: to look for garbage in it again and again is a third of the work
    progress = Progress()
    if wait_s is None:
        report = check.check(settings, incremental=incremental, progress=progress)
    else:
        try:
            report = check.check_settled(settings, wait_s, incremental=incremental, progress=progress)
        except check.InFlightError as error:
            _show(error.report, as_json)
            raise
    _show(report, as_json)
    findings = report.findings
    if findings:
        problems = "; ".join(map(str, findings))
        raise Failure(f"{plural(len(findings), 'problem')} found: {problems}", code="problems-found")


def _show(report: Report, as_json: bool) -> None:
    click.echo(as_text(report) if as_json else describe(report))


class Progress:
    """Shows on stderr how far a long check is, every ten seconds if that has changed."""

    def __init__(self) -> None:
        self._due_at = time.monotonic() + PROGRESS_S
        self._shown = ""

    def __call__(self, line: str) -> None:
        """Show a line, unless it is the last one that was shown, or another one was shown a moment ago."""
        if line != self._shown and time.monotonic() >= self._due_at:
            click.echo(line, err=True)
            self._due_at, self._shown = time.monotonic() + PROGRESS_S, line


def as_text(report: Report) -> str:
    """The report as JSON. Numbers are exact, also those with a fraction."""
    return msgspec.json.format(msgspec.json.Encoder(decimal_format="number").encode(report.as_dict())).decode()


def describe(report: Report) -> str:
    """The report for a person: topic by topic, and sink by sink."""
    lines: list[Line] = []
    for topic in report.topics:
        lines += _topic(topic)
    if len(report.topics) > 1:
        lines += _counts("all topics", report)
    for sink in report.sinks:
        lines += _sink(sink)
    lines += [("note", note) for note in report.notes]
    width = max([LABEL_WIDTH_MIN, *(len(label) for label, _ in lines)])
    return "\n".join(f"{label:<{width}} {text}" for label, text in lines)


def _topic(topic: TopicReport) -> Iterator[Line]:
    yield from _counts(f"topic {topic.name}", topic)
    if topic.repeated_versions:
        yield "", f"{plural(topic.repeated_versions, 'version')} of a key on different events"
    if topic.spread_keys:
        yield "", f"{plural(topic.spread_keys, 'key')} with events on several partitions"
    if topic.malformed.count:
        yield "", f"{plural(topic.malformed.count, 'record')} outside the contract"
    if topic.malformed.acknowledged:
        yield "", f"{plural(topic.malformed.acknowledged, 'record')} outside the contract, discarded"
    if topic.pruned or topic.foreign.count:
        yield "", f"{plural(topic.pruned, 'event')} pruned from the outbox, {topic.foreign.count} foreign"


def _counts(label: str, of: TopicReport | Report) -> Iterator[Line]:
    before = f" ({of.verified_before} verified before)" if of.verified_before else ""
    records = f"{plural(of.records, 'record')}{before}, {plural(of.duplicates, 'duplicate')}"
    yield label, f"{records}; {plural(of.outbox_events, 'event')} in the outbox"
    missing = plural(of.missing_versions, "version")
    yield "", f"{len(of.lost)} lost, {missing} missing, {of.in_flight} in flight"


def _sink(sink: SinkReport) -> Iterator[Line]:
    lost = f", {sink.lost} lost" if sink.lost else ""
    not_compared = f"; not compared: {sink.not_compared}" if sink.not_compared else ""
    yield f"sink {sink.name}", f"{sink.in_flight} in flight, {sink.parked} set aside{lost}{not_compared}"
    if sink.discarded:
        yield "", f"{sum(sink.discarded.values())} discarded: {_reasons(sink.discarded)}"
    if sink.filtered:
        yield "", f"{plural(sink.filtered, 'event')} filtered by its transform"
    for comparison in sink.comparisons:
        yield from _comparison(comparison)


def _reasons(discarded: Mapping[str, int]) -> str:
    most = sorted(discarded.items(), key=lambda entry: (-entry[1], entry[0]))
    shown = [f"{reason} ({count})" for reason, count in most[:REASONS_SHOWN]]
    return ", ".join([*shown, *(["…"] if len(most) > REASONS_SHOWN else [])])


def _comparison(one: ComparisonReport) -> Iterable[Line]:
    if one.not_compared:
        result = f"not compared: {one.not_compared}"
    elif one.differences.count:
        result = f"DIFFERS in {plural(one.differences.count, 'key')}"
    elif one.drift:
        result = f"DRIFTS by {text_of(one.drift_total)} in {plural(len(one.drift), 'key')}"
    else:
        result = f"equals the source ({plural(one.keys, 'key')})"
    uncertain = f", {plural(len(one.uncertain), 'key')} uncertain" if one.uncertain else ""
    yield "", f"{one.name}: {result}{uncertain}"
    worst = sorted(one.drift.items(), key=lambda entry: -abs(entry[1]))[:WORST_SHOWN]
    for key, difference in worst:
        yield "", f"    {key}  {text_of(difference, sign='+')}"
    for row in one.differences.worst[:WORST_SHOWN]:
        kind = "" if row.row == "differs" else f"is {row.row} in the sink: "
        yield "", f"    {row.key}  {kind}{'; '.join(row.lines)}"
    if one.differences.count > WORST_SHOWN:
        yield "", f"    and {plural(one.differences.count - WORST_SHOWN, 'more key')}"
