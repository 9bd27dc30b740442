"""outbox roles: the databases, and a role for each part."""

from __future__ import annotations

import os

import click

from outbox.base.settings import load


@click.command("roles")
@click.option("--print", "is_printed", is_flag=True, help="Print the SQL for an administrator, and run nothing.")
@click.option(
    "--only", type=click.Choice(["source", "sink"]), help="One database: that of the service, or that of the sinks."
)
def roles_command(is_printed: bool, only: str | None) -> None:
    """Make the databases and a role for each part, or set their passwords anew.

    It logs in as PGUSER with PGPASSWORD, who may create roles and databases and give the right to replicate; without
    these variables, as the superuser of the embedded stack. Statements and logs have no password in clear text.
    """
    from outbox.migrations import roles

    settings, administrator = load(), None
    if "PGUSER" in os.environ:
        administrator = roles.Administrator(os.environ["PGUSER"], os.environ.get("PGPASSWORD", ""))
    for database in roles.DATABASES:
        if only in (None, database):
            if is_printed:
                click.echo("\n".join(roles.printed(settings, database)))
            else:
                roles.make(settings, database, administrator)
                click.echo(f"{database:<10} the roles have their passwords and rights")
