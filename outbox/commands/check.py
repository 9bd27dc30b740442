"""outbox check: compare ledger, topic and sinks."""

from __future__ import annotations

import json

import click

from outbox.audit import check as checker
from outbox.audit.check import Report
from outbox.base import settings as configuration
from outbox.base.errors import Failure

WORST_SHOWN = 5


@click.command()
@click.option("--settle", "settle_s", type=float, help="Wait up to so many seconds until nothing is in flight.")
@click.option("--json", "as_json", is_flag=True, help="For a script.")
def check(settle_s: float | None, as_json: bool) -> None:
    """Compare the ledger's outbox, the topic and every sink. Status 1 on a loss, a gap, a drift or a parked event.

    Works beside running writers and sinks: what is in flight is counted apart.
    """
    settings = configuration.load()
    report = checker.check(settings) if settle_s is None else checker.check_settled(settings, settle_s)
    click.echo(json.dumps(report.as_dict(), indent=2) if as_json else describe(report))
    if report.findings:
        raise Failure("; ".join(report.findings))


def describe(report: Report) -> str:
    """The report for a person, a line for each place of the chain."""
    lines = [
        f"ledger       {len(report.totals)} accounts, {report.outbox_events} events in the outbox",
        f"topic        Found {report.duplicates} duplicates in {report.records} events; {len(report.lost)} lost, "
        f"{report.gaps} gaps in versions, {report.in_flight} in flight",
    ]
    if report.malformed:
        lines.append(f"             {report.malformed} records are no events")
    if report.unknown:
        lines.append(f"             {report.unknown} events are not in the outbox (pruned there, or foreign)")
    for sink in report.sinks:
        verdict = sink.unread or (
            "agrees with the ledger"
            if not sink.drift
            else f"DRIFTS by {sink.drift_total} in {len(sink.drift)} accounts"
        )
        apart = f"{sink.in_flight} in flight, {sink.parked} parked" + (f", {sink.lost} lost" if sink.lost else "")
        lines.append(f"sink {sink.name:<7} {verdict}; {apart}")
        worst = sorted(sink.drift.items(), key=lambda entry: -abs(entry[1]))[:WORST_SHOWN]
        lines += [f"             {key}  {amount:+d}" for key, amount in worst]
    return "\n".join(lines)
