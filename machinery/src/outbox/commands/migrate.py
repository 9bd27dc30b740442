"""outbox roles and outbox migrate: databases with a role for each part, and their newest schema."""

from __future__ import annotations

import os
from collections.abc import Sequence

import click

from outbox.base.settings import load


@click.command("roles")
@click.option("--print", "is_printed", is_flag=True, help="Print the SQL for an administrator, and run nothing.")
@click.option(
    "--only", type=click.Choice(["source", "sink"]), help="One database: that of the service, or that of the sinks."
)
def roles_command(is_printed: bool, only: str | None) -> None:
    """Make the databases and a role for each part, or set their passwords anew.

    It logs in as PGUSER with PGPASSWORD, who may create roles and databases and give the right to replicate. Statements
    and logs have no password in clear text. The embedded stack makes its roles itself, at each start.
    """
    from outbox.migrations import roles

    if not is_printed and "PGUSER" not in os.environ:
        raise click.UsageError("set PGUSER and PGPASSWORD: who may create roles; or use --print")
    settings = load()
    administrator = roles.Administrator(os.environ.get("PGUSER", ""), os.environ.get("PGPASSWORD", ""))
    for database in roles.DATABASES:
        if only in (None, database):
            if is_printed:
                click.echo("\n".join(roles.printed(settings, database)))
            else:
                roles.make(settings, database, administrator)
                click.echo(f"{database:<10} the roles have their passwords and rights")


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
