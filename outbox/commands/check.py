"""outbox check: compare source, topic and sinks."""

from __future__ import annotations

import gc
import time

import click
import msgspec

from outbox.audit import check as checker
from outbox.audit.report import Report, SinkReport, number, plural
from outbox.base import settings as configuration
from outbox.base.errors import Failure

WORST_SHOWN = 5
LABEL_WIDTH = 13
PROGRESS_S = 10.0


@click.command()
@click.option("--wait", "wait_s", type=float, help="Wait up to this many seconds until no event is in flight.")
@click.option("--incremental", is_flag=True, help="Read what came since the last such check that found no problem.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for a script.")
def check(wait_s: float | None, incremental: bool, as_json: bool) -> None:
    """Compare the source, the topic and every sink. Status 1 if a problem is found.

    Problems are lost and foreign events, missing versions, records that break the contract, drift, and events that a
    sink has set aside. Duplicates on the topic are not problems. The command works beside running writers and sinks:
    events in flight are counted apart.

    With --incremental it can run every few minutes on a large topic. In any doubt it reads everything.

    \b
    The keys of --json are stable; `null` is no value:
      topic, keys, outbox_events, records, verified_before, duplicates, missing_versions, in_flight, pruned, settled
      lost       ids of the events that are in the outbox and that the topic has skipped
      malformed  count, first, reasons (by kind): records that break the contract
      foreign    count, first, worst: valid events that never were in the outbox
      sinks      name, drift (by key), drift_total, in_flight, lost, parked (all that it has set aside), duplicates,
                 uncertain_keys, not_compared
      notes      what is not compared, and why
      findings   code, message, count, first, worst, sink
    """
    settings = configuration.load()
    gc.freeze()  # what is imported stays: to look for garbage in it again and again is a third of the work
    progress = Progress()
    if wait_s is None:
        report = checker.check(settings, incremental=incremental, progress=progress)
    else:
        report = checker.check_settled(settings, wait_s, incremental=incremental, progress=progress)
    click.echo(as_text(report) if as_json else describe(report))
    findings = report.findings
    if findings:
        problems = "; ".join(map(str, findings))
        raise Failure(f"{plural(len(findings), 'problem')} found: {problems}", code="problems-found")


class Progress:
    """Shows on stderr how far a long check is, every ten seconds."""

    def __init__(self) -> None:
        self._due_at = time.monotonic() + PROGRESS_S

    def __call__(self, line: str) -> None:
        """Show a line, unless another one was shown a moment ago."""
        if time.monotonic() >= self._due_at:
            click.echo(line, err=True)
            self._due_at = time.monotonic() + PROGRESS_S


def as_text(report: Report) -> str:
    """The report as JSON. Numbers are exact, also those with a fraction."""
    return msgspec.json.format(msgspec.json.Encoder(decimal_format="number").encode(report.as_dict())).decode()


def describe(report: Report) -> str:
    """The report for a person, one line per place of the chain."""
    outside = f"{plural(report.pruned, 'event')} pruned from the outbox, {report.foreign.count} foreign"
    before = f" ({report.verified_before} verified before)" if report.verified_before else ""
    lines = [
        ("source", f"{plural(len(report.totals), 'key')}, {plural(report.outbox_events, 'event')} in the outbox"),
        ("topic", f"{plural(report.records, 'record')}{before}, {plural(report.duplicates, 'duplicate')}"),
        ("", f"{len(report.lost)} lost, {report.missing_versions} versions missing, {report.in_flight} in flight"),
    ]
    if report.malformed.count:
        lines.append(("", f"{plural(report.malformed.count, 'record')} violate the contract"))
    if report.pruned or report.foreign.count:
        lines.append(("", outside))
    for sink in report.sinks:
        lines += _sink(sink)
    lines += [("note", note) for note in report.notes]
    return "\n".join(f"{label:<{LABEL_WIDTH - 1}} {text}" for label, text in lines)


def _sink(sink: SinkReport) -> list[tuple[str, str]]:
    if sink.not_compared:
        result = f"not compared: {sink.not_compared}"
    elif sink.drift:
        result = f"DRIFTS by {number(sink.drift_total)} in {plural(len(sink.drift), 'key')}"
    else:
        result = "equals the source"
    counts = {"lost": sink.lost, "keys uncertain": len(sink.uncertain)}
    rest = "".join(f", {count} {name}" for name, count in counts.items() if count)
    worst = sorted(sink.drift.items(), key=lambda entry: -abs(entry[1]))[:WORST_SHOWN]
    return [
        (f"sink {sink.name}", f"{result}; {sink.in_flight} in flight, {sink.parked} parked{rest}"),
        *(("", f"{key}  {number(difference, sign='+')}") for key, difference in worst),
    ]
