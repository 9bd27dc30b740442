"""outbox prune: delete what nothing can bring again, from the outbox table and from the sinks' tables."""

from __future__ import annotations

import json

import click

from outbox.base.errors import Failure
from outbox.base.settings import Settings, load
from outbox.maintenance import prune, retention
from outbox.maintenance.prune import PruneResult
from outbox.relay import connectors, slot


@click.command("prune")
@click.option("--keep-hours", type=click.IntRange(min=0), help="Keep younger events (OUTBOX_PRUNE_KEEP_HOURS).")
@click.option("--trust-marker", is_flag=True, help="Also delete events that their topics may have dropped.")
@click.option("--only", type=click.Choice(["outbox"]), help="Only the outbox table, for a chain without our sinks.")
@click.option("--dry-run", is_flag=True, help="Only report what would be looked up and deleted.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0, min_open=True),
    default=prune.PASS_TIMEOUT_S,
    show_default=True,
    help="Seconds that the relay may take to pass the marker.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON for a script.")
def prune_command(
    *, keep_hours: int | None, trust_marker: bool, only: str | None, dry_run: bool, timeout_s: float, as_json: bool
) -> None:
    """Delete relayed outbox rows and expired rows of the sinks. Status 1 if it finds a lost event.

    It deletes outbox events that were relayed for certain: it sends markers through the relay, waits until they have
    passed, and looks up each event on its topic. In the sink database it deletes deduplication ids, landed events and
    resolved dead letters of events that neither outbox, log, a topic nor an open dead letter can bring again.

    It works beside writers, relay and sinks, and reports why the rest stays. Run it on a schedule: this also keeps the
    slot of an idle outbox moving. A dry run deletes nothing, but may send markers too.
    """
    settings = load()
    hours = settings.prune_keep_hours if keep_hours is None else keep_hours
    show = (lambda _: None) if as_json else click.echo
    result = None
    if dry_run:
        old = prune.count_old(settings, hours)
        show(f"outbox       {old} events are older than {hours} h and would be looked up on their topics")
    else:
        result = prune.prune(
            settings,
            keep_hours=hours,
            trust_marker=trust_marker,
            sinks=not only,
            timeout_s=timeout_s,
            report=lambda line: show(f"outbox       {line}"),
        )
        show(describe(result, settings))
    expired = None
    if not only:
        expired = retention.expire(
            settings,
            dry_run=dry_run,
            report=lambda line: show(f"sinks        {line}"),
            nudge=lambda: prune.mark(settings),
        )
        kept = f"sinks        ids from {expired.horizon} on are kept"
        show(kept + ("" if expired.due else "; nothing older to forget"))
    if as_json:
        outbox = {"old": old} if result is None else result.as_dict()
        forgotten = None if expired is None else expired.as_dict()
        click.echo(json.dumps({"dry_run": dry_run, "outbox": outbox, "retention": forgotten}, indent=2))
    if result is not None and result.lost.count:
        raise Failure(
            f"{result.lost.count} events are lost: relayed past, and on no topic ({result.lost.first} …)",
            connectors.load(settings).start_again,
            code="events-lost",
        )


def describe(result: PruneResult, settings: Settings) -> str:
    """What was done and why that was safe, for a person."""
    passed = result.passed
    if passed is None:
        return "outbox       no event is old enough; markers sent"
    lines = [
        f"marker       at {slot.lsn(passed.marker_lsn)}, passed by the stored offset {slot.lsn(passed.offset_lsn)} "
        f"and by slot {settings.connector} {slot.lsn(passed.slot_lsn)}",
        f"topics       {result.found} old events found",
        f"outbox       {result.deleted} events deleted",
    ]
    if result.lost.count:
        lines.append(f"             {result.lost.count} kept, because no topic has them ({result.lost.first} …)")
    if result.too_old.count:
        lines.append(
            f"             {result.too_old.count} kept, because their topics may have dropped them "
            f"({result.too_old.first} …); --trust-marker deletes these"
        )
    return "\n".join(lines)
