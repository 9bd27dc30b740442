"""outbox prune: forget what can never come again, of the outbox and of processed_events."""

from __future__ import annotations

import json

import click

from outbox.base import settings as configuration
from outbox.base.errors import Failure
from outbox.base.settings import Settings
from outbox.maintenance import prune as pruning
from outbox.maintenance import retention
from outbox.maintenance.prune import Pruned
from outbox.relay import connectors, slot


@click.command()
@click.option("--keep-hours", type=click.IntRange(min=0), help="Leave younger events alone (OUTBOX_PRUNE_KEEP_HOURS).")
@click.option("--trust-marker", is_flag=True, help="Delete also what is too old to be looked up on the topic.")
@click.option("--dry-run", is_flag=True, help="Only tell what would be deleted, or looked up for that.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0, min_open=True),
    default=pruning.PASS_TIMEOUT_S,
    show_default=True,
    help="Seconds that the relay is given to pass the marker.",
)
@click.option("--json", "as_json", is_flag=True, help="For a script.")
def prune(*, keep_hours: int | None, trust_marker: bool, dry_run: bool, timeout_s: float, as_json: bool) -> None:
    """Forget what can never come again, with the evidence. Status 1 if it finds an event that is lost.

    Of the outbox, the events that are surely relayed: it sends markers through the relay, waits until they have passed,
    and looks each event up on the topic. Of processed_events, the days of which neither outbox, log, topic nor an open
    dead letter can bring an event again. Works beside writers, relay and sinks. Run on a schedule it also keeps the
    slot of an idle outbox moving. A dry run sends its markers, too, and deletes nothing.
    """
    settings = configuration.load()
    hours = settings.prune_keep_hours if keep_hours is None else keep_hours
    tell = (lambda _: None) if as_json else click.echo
    done = None
    if dry_run:
        old = pruning.count_old(settings, hours)
        tell(f"outbox       {old} events are older than {hours} h and would be looked up on {settings.topic}")
    else:
        done = pruning.prune(
            settings,
            keep_hours=hours,
            trust_marker=trust_marker,
            timeout_s=timeout_s,
            report=lambda line: tell(f"outbox       {line}"),
        )
        tell(describe(done, settings))
    retired = retention.retire(
        settings, dry_run=dry_run, report=lambda line: tell(f"processed    {line}"), stir=lambda: pruning.mark(settings)
    )
    tell(f"processed    everything from {retired.upto} on is kept")
    if as_json:
        outbox = {"old": old} if done is None else done.as_dict()
        click.echo(json.dumps({"dry_run": dry_run, "outbox": outbox, "processed_events": retired.as_dict()}, indent=2))
    if done is not None and done.lost.count:
        raise Failure(
            f"{done.lost.count} events are lost: relayed past, and not on the topic ({done.lost.first} …)",
            connectors.load(settings).start_again,
        )


def describe(done: Pruned, settings: Settings) -> str:
    """What was done and why that was safe, for a person."""
    evidence = done.evidence
    lines = [
        f"marker       at {slot.lsn(evidence.marker_lsn)}, passed by the stored offset {slot.lsn(evidence.offset_lsn)} "
        f"and by slot {settings.connector} {slot.lsn(evidence.slot_lsn)}",
        f"topic        {done.found} old events found",
        f"outbox       {done.deleted} events deleted",
    ]
    if done.lost.count:
        lines.append(f"             {done.lost.count} kept, as they are not on the topic ({done.lost.first} …)")
    if done.too_old.count:
        lines.append(
            f"             {done.too_old.count} kept, as the topic may have dropped them ({done.too_old.first} …); "
            "--trust-marker deletes these"
        )
    return "\n".join(lines)
