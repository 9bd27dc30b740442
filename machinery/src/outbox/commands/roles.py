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
