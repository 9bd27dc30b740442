"""outbox migrate: both databases to the newest schema."""

from __future__ import annotations

import click

from outbox.base import settings as configuration
from outbox.migrations import migrate as migrations


@click.command()
def migrate() -> None:
    """Bring both databases to the newest schema, machinery and domain. A second run changes nothing."""
    for database, applied in migrations.migrate(configuration.load()).items():
        click.echo(f"{database:<10} {'applied ' + ', '.join(applied) if applied else 'up to date'}")
