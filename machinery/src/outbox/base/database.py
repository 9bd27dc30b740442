"""Connections to the two databases, each as a role.

Server, database and role may set how a session reads and writes. Our sessions set what our statements rely on
(`session_options`), so that they mean the same everywhere.
"""

from __future__ import annotations

import os
import re
import select
import shlex
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from outbox.base.errors import Failure
from outbox.base.heavy import extensions, psycopg2
from outbox.base.settings import PREFIX, Role, Settings, SinkRole, SourceRole, password_setting, role_database

Row = Mapping[str, Any]  # by column

CONNECT_TIMEOUT_S = 5
PASSWORD_TIMEOUT_S = 10
# Detect a vanished host within half a minute, not after hours.
WAITS = {
    "connect_timeout": CONNECT_TIMEOUT_S,
    "keepalives_idle": 15,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}
# What our statements and psycopg2 rely on, in the sessions of the service too.
SESSION = {
    "DateStyle": "ISO,MDY",
    "IntervalStyle": "postgres",
    "TimeZone": "UTC",
    "quote_all_identifiers": "off",  # `outbox migrate` reads the definition of a constraint
    "standard_conforming_strings": "on",
}
# In sessions of the machinery alone. Where another schema came first, a table there would hide ours.
OF_MACHINERY = {
    **SESSION,
    "default_transaction_isolation": "read committed",
    "search_path": "public",
    # The text of a value, which `outbox check` compares.
    "extra_float_digits": "1",
    "bytea_output": "hex",
}
# For a role that reads: a query whose rows a policy would hide fails. The two roles that write for the adopter run the
# adopter's own SQL, perhaps on tables with policies of its own.
READER = {**OF_MACHINERY, "row_security": "off"}
WRITERS = (SourceRole.APP, SinkRole.WRITER)

# SQLSTATEs of what another attempt may not meet: a rollback for a deadlock or a conflict, no room or no memory, a lock
# that was not free in time, a statement that was cancelled, a server that is a standby now.
BUSY = ("25006", "40", "53", "55P03", "57014")
# What a server says that takes no login now.
NOT_NOW = ("the database system is", "connection slots", "too many")
DATA = "22"
QUOTED = re.compile(r'".*("|$)', re.DOTALL)  # a value may have quotes and line feeds
NO_ROOM = "No space left on device"  # at a login it writes a cache

COLUMN_NAMES = "SELECT attname FROM pg_attribute WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped"


def login(settings: Settings, role: Role) -> dict[str, str | int]:
    """libpq's parameters of a login now. The password of a managed server may be a token that lives for minutes: then
    a command prints it.

    Raises Failure `password-command-failed` if that does not end well within PASSWORD_TIMEOUT_S.
    """
    parameters = settings.dsn(role)
    command = settings.db_password_command
    if command is None:
        return parameters
    given = {"PGHOST": "host", "PGPORT": "port", "PGUSER": "user", "PGDATABASE": "dbname"}
    environment = {**os.environ, **{name: str(parameters[parameter]) for name, parameter in given.items()}}
    try:
        done = subprocess.run(
            shlex.split(command),
            env=environment,
            capture_output=True,
            text=True,
            timeout=PASSWORD_TIMEOUT_S,
            check=True,
        )
    except (OSError, ValueError, IndexError, subprocess.SubprocessError) as error:  # quotes count too
        printed = error.stderr if isinstance(error, subprocess.CalledProcessError) else ""
        said = (printed or str(error)).strip().rpartition("\n")[2]
        raise Failure(
            f"the command prints no password of {parameters['user']}: {said}",
            f"correct {PREFIX}DB_PASSWORD_COMMAND",
            code="password-command-failed",
        ) from error
    return {**parameters, "password": done.stdout.strip()}


def connect(settings: Settings, role: Role, **options: str) -> extensions.connection:
    """A psycopg2 connection as a role, to the database that the role belongs to; with further settings of the session.

    Raises Failure naming the server if it refuses the login or is unavailable.
    """
    parameters = login(settings, role)
    try:
        return psycopg2.connect(
            extensions.make_dsn(None, **parameters, **session(role, **options), application_name="outbox")
        )
    except psycopg2.OperationalError as error:
        name = settings.role_name(role)
        where = f"database {parameters['dbname']} at {parameters['host']}:{parameters['port']} as {name}"
        lines = [line for line in str(error).strip().splitlines() if not line.startswith("\t")]  # libpq's own advice
        reason, remedy, code = refusal_of(settings, role, lines)
        raise Failure(f"{where}: {reason}", remedy, code=code) from error


def session(role: Role, **options: str) -> dict[str, str | int]:
    """libpq's parameters of a session of the machinery, beside those that say where and as whom."""
    settings = OF_MACHINERY if role in WRITERS else READER
    return {**WAITS, "client_encoding": "UTF8", "options": session_options({**settings, **options})}


def session_options(settings: Mapping[str, str]) -> str:
    """libpq's parameter ``options``: settings that win over those of the server, the database and the role."""
    return " ".join(f"-c {name}=" + value.replace(" ", r"\ ") for name, value in settings.items())


def query(settings: Settings, role: Role, statement: str, parameters: object = None) -> list[tuple[Any, ...]]:
    """Run one statement as a role, on a connection of its own, commit, and return its rows if it has any."""
    with closing(connect(settings, role)) as connection, connection, connection.cursor() as cursor:
        cursor.execute(statement, parameters)  # type: ignore[arg-type]
        return [] if cursor.description is None else cursor.fetchall()  # a row may have no columns


def hang_up(connection: extensions.connection) -> None:
    """Break a connection, also while another thread waits for an answer: that thread gets an error at once.

    psycopg2's `close` would wait for the answer too.
    """
    if not connection.closed:
        with suppress(OSError), closing(socket.socket(fileno=os.dup(connection.fileno()))) as one:
            one.shutdown(socket.SHUT_RDWR)


def is_cut_off(connection: extensions.connection) -> bool:
    """Whether the server has ended a connection, or its host does not answer keepalives. Sends nothing."""
    poll = select.poll()
    try:
        poll.register(connection.fileno(), select.POLLRDHUP)  # errors are reported unasked
    except psycopg2.InterfaceError:  # it is closed
        return True
    return bool(poll.poll(0))


def column_names(connection: extensions.connection, relation: str) -> set[str]:
    """The columns of a table or view in schema public; none if it does not exist."""
    with connection.cursor() as cursor:
        cursor.execute(COLUMN_NAMES, [f"public.{relation}"])
        return {name for (name,) in cursor}


def refusal_of(settings: Settings, role: Role, lines: Sequence[str]) -> tuple[str, str, str]:
    """Why a login failed: the most informative line of libpq, the remedy, and the failure's code.

    libpq reports one line per attempt. After a refused attempt with TLS it may try one without, which a server may
    refuse for that reason alone.
    """
    url = f"{PREFIX}{role_database(role).upper()}_URL"
    password = f"{PREFIX}{password_setting(role).upper()}"
    causes = {
        "authentication method requirement": (
            "login-refused",
            f"let it ask for a password by SCRAM, or set sslmode=verify-full in {url}: then it may ask otherwise",
        ),
        "certificate": ("tls", f"correct sslrootcert in {url}, or its host: use a name in the certificate"),
        "password": ("login-refused", f"correct {password}; `outbox roles` sets it in the database"),
        "no encryption": ("tls", f"set sslmode in {url}: the server requires TLS"),
        **dict.fromkeys(NOT_NOW, ("unavailable", "wait until it takes logins")),
        NO_ROOM: ("unavailable", "give its disk room"),
        "SSL": ("tls", f"correct {url}: its sslmode, host or port"),
        "FATAL": (
            "login-refused",
            "`outbox roles` makes roles and databases; pg_hba.conf says who may log in from where",
        ),
    }
    for sign, (code, remedy) in causes.items():
        found = [line for line in lines if sign in line]
        if found:
            return found[0], remedy, f"database-{code}"
    remedy = f"start it, or correct {url}"
    if "refused" in lines[-1] and settings.is_embedded(f"{role_database(role)}_url"):
        remedy = "`outbox up` starts the embedded one"
    return lines[-1], remedy, "database-unavailable"


def reason_of(error: Exception) -> str:
    """The first line of an error. What a value of a row is to blame for (SQLSTATE 22…) has no values in it."""
    if isinstance(error, psycopg2.Error) and str(error.pgcode).startswith(DATA):
        return QUOTED.sub('"…"', error.diag.message_primary or "a value is not valid")
    return str(error).strip().partition("\n")[0]


@contextmanager
def connected(settings: Settings, role: Role, subject: str) -> Iterator[extensions.connection]:
    """A connection as a role. Errors inside the block become Failure, as by `database_errors`."""
    with (
        closing(connect(settings, role)) as connection,
        database_errors(connection, subject, "refused it", "run the command again"),
    ):
        yield connection


@contextmanager
def naming(file: Path) -> Iterator[None]:
    """Let an error inside the block name the file of the statement. `database_errors` shows the name."""
    try:
        yield
    except Exception as error:
        error.add_note(str(file))
        raise


@contextmanager
def database_errors(connection: extensions.connection, subject: str, what: str, again: str) -> Iterator[None]:
    """Convert psycopg2 errors inside the block to Failure: "SUBJECT: the database WHAT: the server's message".

    ``again`` says how to repeat the operation once the cause is fixed. The code is `database-busy` if the cause may
    pass by itself.
    """
    try:
        yield
    except psycopg2.Error as last:
        error = last
        if isinstance(last, psycopg2.InterfaceError):  # of the rollback, where the connection has ended before
            if isinstance(last.__context__, Failure):
                raise last.__context__ from None
            if isinstance(last.__context__, psycopg2.Error):
                error = last.__context__
        reason = ": ".join([*getattr(error, "__notes__", ()), reason_of(error)])
        if connection.closed:
            raise Failure(
                f"{subject}: lost its database connection: {reason}", again, code="database-connection-lost"
            ) from error
        if isinstance(error, psycopg2.errors.UndefinedTable):
            raise Failure(
                f"{subject}: the database {what}: {reason}",
                "`outbox migrate`; if that finds it up to date, somebody dropped the table: restore a backup",
                code="database-not-migrated",
            ) from error
        code = "database-busy" if str(error.pgcode).startswith(BUSY) else "database-refused"
        raise Failure(
            f"{subject}: the database {what}: {reason}", f"correct the cause and {again}", code=code
        ) from error
