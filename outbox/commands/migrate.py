"""outbox migrate: both databases to the newest schema."""

from __future__ import annotations

from collections.abc import Sequence

import click

from outbox.base import settings as configuration
from outbox.migrations import migrate as migrations


@click.command()
@click.option(
    "--only",
    type=click.Choice(["outbox"]),
    help="Only the outbox table with publication and grants, for a service with migrations of its own.",
)
def migrate(only: str | None) -> None:
    """Bring both databases to the newest schema, machinery and domain. A second run changes nothing."""
    settings = configuration.load()
    if only:
        _show(only, migrations.migrate_outbox(settings))
    else:
        for database, applied in migrations.migrate(settings).items():
            _show(database, applied)


def _show(what: str, applied: Sequence[str]) -> None:
    click.echo(f"{what:<10} {'applied ' + ', '.join(applied) if applied else 'up to date'}")
