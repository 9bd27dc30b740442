"""outbox check, doctor and monitor: look at the chain. They change nothing, but that monitor restarts a task."""

from __future__ import annotations

import gc
import json
import signal
import threading
from functools import partial
from typing import TYPE_CHECKING

import click

from outbox.base.errors import Failure, plural
from outbox.base.settings import address, load
from outbox.base.terminal import sparse

if TYPE_CHECKING:
    from outbox.audit.report import Report

PROGRESS_S = 10.0


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

    Files in the folder `comparisons` of a sink say which totals and rows are compared.

    If --wait ends while events are in flight, the report shows where they are, with status 1.

    With --incremental it can run every few minutes on large topics: it reads and counts what came since. In any doubt
    it reads everything.

    \b
    The keys of --json are stable:
      topics   name, outbox_events, records, acknowledged, duplicates, in_flight, pruned, and
                 lost       ids of the events that are in the outbox and that the topic has skipped
                 malformed  by reason, how many records break the contract; acknowledged are those that were discarded
                 repeated   by event, how many records repeat one; duplicates is their sum
      total    the numbers of all topics added up
      sinks    name, in_flight, lost, parked (all that it has set aside), discarded (dead letters by reason),
               duplicates, filtered (by its transform), not_compared, and
                 comparisons  name, keys, drift (by key), drift_total, uncertain_keys, not_compared, differing_keys, and
                   differences  the 20 worst rows: key, row (differs, missing or surplus in the sink), columns (by name:
                                source, sink; the beginning of a value above 200 characters)
      notes              what is not compared, and why
      settled            whether nothing is in flight
      findings           code, message, count, first, worst, topic, sink, comparison; null or "" if absent
    """
    from outbox.audit import check

    settings = load()
    gc.freeze()  # what is imported stays: to look for garbage in it again and again is a third of the work
    progress = sparse(partial(click.echo, err=True), PROGRESS_S)
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
    click.echo(report.as_json() if as_json else report.as_text())


@click.command()
@click.option(
    "--only", type=click.Choice(["outbox"]), help="Only up to the topics, for a service with migrations of its own."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON for a script.")
def doctor(only: str | None, as_json: bool) -> None:
    """Look at every hop: databases, slot, connector, topics, sinks, retention. Status 1 if a problem is found.

    Changes nothing. Use `outbox check` to learn whether events are lost or duplicated.

    \b
    The keys of --json are stable, a list of:
      hop, code, message, remedy (null if all is well), is_ok
    """
    from outbox.audit.doctor import examine

    diagnoses = []
    for diagnosis in examine(load(), only_outbox=only is not None):
        diagnoses.append(diagnosis)
        if not as_json:
            mark = click.style("ok ", fg="green") if diagnosis.is_ok else click.style("FIX", fg="red")
            remedy = f" — {diagnosis.remedy}" if diagnosis.remedy else ""
            click.echo(f"{mark} {diagnosis.hop:<10}{diagnosis.message}{remedy}")
    if as_json:
        click.echo(json.dumps([diagnosis.as_dict() for diagnosis in diagnoses], indent=2))
    problems = [diagnosis for diagnosis in diagnoses if not diagnosis.is_ok]
    if problems:
        raise Failure(f"{plural(len(problems), 'problem')} found; first: {problems[0].message}", code="problems-found")


@click.command("monitor")
@click.option(
    "--bind", type=address, default="127.0.0.1:9401", metavar="HOST:PORT", help="Where it listens; 127.0.0.1:9401."
)
@click.option(
    "--check-every", "every_s", type=click.FloatRange(min=1), default=300.0, help="Seconds between two checks; 300."
)
def monitor_command(bind: tuple[str, int], every_s: float) -> None:
    """Serve Prometheus metrics of what no other process exports: slot, connector, dead letters, losses, drift.

    It reads as the auditor, and runs until it is stopped. It restarts a connector's task that the broker has forgotten,
    and changes nothing else. Each metric describes itself (`# HELP`).
    """
    from outbox.audit import monitor

    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    monitor.serve(load(), bind, every_s, click.echo, ended)
