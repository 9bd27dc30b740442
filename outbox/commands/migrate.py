"""outbox migrate: both databases to the newest schema."""

from __future__ import annotations

import click

from outbox import migrate as migrations
from outbox import settings as configuration


@click.command()
def migrate() -> None:
    """Bring both databases to the newest schema, machinery and domain. A second run changes nothing."""
    for database, applied in migrations.migrate(configuration.load()).items():
        click.echo(f"{database:<10} {'applied ' + ', '.join(applied) if applied else 'up to date'}")
