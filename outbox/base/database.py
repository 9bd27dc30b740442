"""Connections to the two databases, each as a role."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import psycopg2
from psycopg2.extensions import connection, make_dsn

from outbox.base.errors import Failure
from outbox.base.settings import PREFIX, Role, Settings, password_setting, role_database

CONNECT_TIMEOUT_S = 5
ROLES = "outbox/migrations/roles.sql"
# A server whose host is gone is noticed within half a minute, not after hours.
KEEPALIVES = {"keepalives_idle": 15, "keepalives_interval": 5, "keepalives_count": 3, "tcp_user_timeout": 30_000}


def connect(settings: Settings, role: Role) -> connection:
    """A psycopg2 connection as a role, to the database that the role belongs to.

    Raises Failure naming the server if it cannot be had.
    """
    parameters = settings.dsn(role)
    try:
        return psycopg2.connect(
            make_dsn(None, **parameters, **KEEPALIVES, connect_timeout=CONNECT_TIMEOUT_S, application_name="outbox")
        )
    except psycopg2.OperationalError as error:
        server = f"{parameters['host']}:{parameters['port']}"
        where = f"database {parameters['dbname']} at {server} as {parameters['user']}"
        lines = [line for line in str(error).strip().splitlines() if not line.startswith("\t")]  # libpq's own advice
        reason, remedy = _refusal(settings, role, lines)
        raise Failure(f"{where}: {reason}", remedy) from error


def _refusal(settings: Settings, role: Role, lines: Sequence[str]) -> tuple[str, str]:
    """The line that tells most of why a login failed, and what to do. libpq has one for each way that it tried."""
    prefix = f"{PREFIX}{role_database(role).upper()}"
    place = f"{prefix}_HOST and {prefix}_PORT"
    # A try over TLS that is refused may be followed by one without, which a server may refuse for that reason.
    for sign, remedy in {
        "certificate": f"correct {prefix}_SSLROOTCERT, or {prefix}_HOST: a name that the certificate has",
        "password": f"correct {PREFIX}{password_setting(role).upper()}; {ROLES} sets it in the database",
        "no encryption": f"set {prefix}_SSLMODE: the server wants TLS",
        "SSL": f"correct {prefix}_SSLMODE, or {place}",
        "FATAL": f"{ROLES} makes roles and databases; pg_hba.conf says who may log in from where",
    }.items():
        told = [line for line in lines if sign in line]
        if told:
            return told[0], remedy
    if "refused" in lines[-1] and settings.is_embedded(f"{role_database(role)}_host", f"{role_database(role)}_port"):
        return lines[-1], "`outbox up` starts the embedded one"
    return lines[-1], f"start it, or correct {place}"


@contextmanager
def database_errors(connection: connection, subject: str, what: str, again: str) -> Iterator[None]:
    """Convert the errors of psycopg2 inside the block to Failure: the database ``what``.

    ``subject`` is the part that failed, and ``again`` how to try once more.
    """
    try:
        yield
    except psycopg2.Error as error:
        reason = str(error).strip().partition("\n")[0]
        if connection.closed:
            raise Failure(f"{subject}: lost its database connection: {reason}", again) from error
        remedy = f"correct the cause and {again}"
        if isinstance(error, psycopg2.errors.UndefinedTable):
            remedy = "`outbox migrate`"
        raise Failure(f"{subject}: the database {what}: {reason}", remedy) from error


told = database_errors  # until every room uses the name
