"""outbox erase: remove the data of one key."""

from __future__ import annotations

import json

import click

from outbox.base.errors import Failure
from outbox.base.settings import load
from outbox.maintenance import erase
from outbox.maintenance.erase import Found, Subject


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
