"""outbox prune and outbox erase: delete what nothing can bring again, and the data of one key."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from outbox.base.errors import Failure, plural
from outbox.base.settings import load
from outbox.maintenance import erase, prune, retention
from outbox.maintenance.erase import Found, Subject
from outbox.maintenance.retention import KEEP_DAYS
from outbox.relay import connectors


@click.command("prune")
@click.option("--keep-hours", type=click.IntRange(min=0), default=24, help="Keep younger events in the outbox; 24.")
@click.option(
    "--keep-days",
    type=click.IntRange(min=1),
    default=KEEP_DAYS,
    help=f"Keep younger landed events and resolved dead letters, which people read; {KEEP_DAYS}.",
)
@click.option("--only", type=click.Choice(["outbox"]), help="Only the outbox table, for a chain without our sinks.")
@click.option("--dry-run", is_flag=True, help="Only report what would be looked up and deleted.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for a script.")
def prune_command(*, keep_hours: int, keep_days: int, only: str | None, dry_run: bool, as_json: bool) -> None:
    """Delete relayed outbox rows and expired rows of the sinks. Status 1 if an old event is on no topic.

    In the outbox it deletes an event once it has seen the event on a topic. In the sink database it deletes
    deduplication ids, landed events and resolved dead letters of events that neither outbox, log, a topic nor an open
    dead letter can bring again.

    It works beside writers, relay and sinks, and reports why the rest stays. Run it on a schedule: it sends markers
    through the relay, which keep the slot of an idle outbox moving. A dry run deletes nothing, but may send markers.
    """
    settings = load()

    def show(line: str) -> None:
        if not as_json:
            click.echo(line)

    result = None
    if dry_run:
        old = prune.count_old(settings, keep_hours)
        show(f"outbox       {old} events are older than {keep_hours} h and would be looked up on their topics")
    else:
        result = prune.prune(
            settings, keep_hours=keep_hours, sinks=not only, report=lambda line: show(f"outbox       {line}")
        )
        kept = result.on_their_way + result.missing
        show(f"outbox       {result.deleted} events deleted" + (f", {kept} kept: on no topic" if kept else ""))
    expired = None
    if not only:
        expired = retention.expire(
            settings,
            keep_days=keep_days,
            dry_run=dry_run,
            report=lambda line: show(f"sinks        {line}"),
            nudge=lambda: prune.mark(settings),
        )
        nothing = "" if expired.evidence else "; nothing older to forget"
        show(f"sinks        ids from {expired.horizon} on are kept{nothing}")
    if as_json:
        outbox = {"old": old} if result is None else asdict(result)
        forgotten = None if expired is None else expired.as_dict()
        click.echo(json.dumps({"dry_run": dry_run, "outbox": outbox, "retention": forgotten}, indent=2))
    if result is not None and result.missing:
        raise Failure(
            f"{plural(result.missing, 'old event')} on no topic ({result.first_missing} …): not relayed yet, lost, or"
            " dropped by the topic; nothing of that was deleted",
            f"`outbox doctor`; if the relay runs, {connectors.load(settings).start_again}",
            code="events-not-on-topic",
        )


@click.command("erase")
@click.argument("aggregate", metavar="AGGREGATE")
@click.argument("key", metavar="KEY")
@click.option("--check", "is_check", is_flag=True, help="Only look; status 1 if there is anything of the key.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for a script; needs --yes or --check.")
def erase_command(*, aggregate: str, key: str, is_check: bool, yes: bool, as_json: bool) -> None:
    """Erase what outbox, stored answers, dead letters and sinks have of a key, and keep it from coming back.

    Erase it in the service first. Former versions of Delta tables are erased too. Topics, logs and backups cannot be
    edited: the command says until when they have the events. It is safe to repeat, beside running sinks.
    """
    if as_json and not (yes or is_check):
        raise click.UsageError("--json needs --yes or --check")
    settings = load()
    one = erase.subject(settings, aggregate, key)
    found = erase.erase(settings, one, dry_run=True)  # so that most failures come before anything is erased
    if not is_check:
        if not yes:
            _print("would erase", one, found)
            click.confirm(f"Erase {aggregate} {one.key} for good?", abort=True)
        found = erase.erase(settings, one)
    remains = erase.remains(settings, one)
    if as_json:
        click.echo(json.dumps({"found": found, "remains": remains}))
    else:
        _print("found" if is_check else "erased", one, found)
        click.echo("\n".join(["remains:", *(f"  {line}" for line in remains)]))
    if is_check and found.total():
        raise Failure(
            f"{found.total()} rows of {aggregate} {one.key} are still there",
            f"`outbox erase {aggregate} {one.key}`",
            code="personal-data-found",
        )


def _print(did: str, one: Subject, found: Found) -> None:
    """Print all places that were looked at, also those without rows."""
    names = ", ".join(aggregate.name for aggregate in one.aggregates)
    click.echo("\n".join([f"{did} of {names} {one.key}:", *(f"  {place}: {rows}" for place, rows in found.items())]))
