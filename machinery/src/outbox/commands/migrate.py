"""outbox migrate: both databases to the newest schema, and the outbox to the declared events."""

from __future__ import annotations

from collections.abc import Sequence

import click

from outbox.base.settings import load


@click.command("migrate")
@click.option(
    "--only",
    type=click.Choice(["outbox"]),
    help="Only the outbox table with publication and grants, for a service with migrations of its own.",
)
@click.option(
    "--only-declared",
    is_flag=True,
    help="Let the outbox refuse events that are no longer declared. Without it an event stays allowed: a service of an "
    "older version may still write it.",
)
def migrate_command(only: str | None, only_declared: bool) -> None:
    """Bring both databases to the newest schema, machinery and domain, and let the outbox take the declared events.

    Each run also repairs the outbox's constraints and publication, and all grants. A second run changes nothing.
    """
    from outbox.migrations.migrate import migrate, wal_level

    settings = load()
    done = migrate(settings, only_outbox=only is not None, only_declared=only_declared)
    for database, applied in done.applied.items():
        _show(only or database, {"applied": applied})
    _show("events", {"added": done.events.added, "removed": done.events.removed})
    for one in done.repaired:
        click.echo(f"repaired   {one}")
    if (level := wal_level(settings)) != "logical":
        click.echo(f"lacking    wal_level is {level}: set it to logical and restart Postgres, for Debezium")


def _show(what: str, changes: dict[str, Sequence[str]]) -> None:
    shown = "; ".join(f"{change} {', '.join(names)}" for change, names in changes.items() if names)
    click.echo(f"{what:<10} {shown or 'up to date'}")
