"""The databases and the roles of every part, each role with the least that it needs. None is a superuser.

`outbox roles` makes them as an administrator, who need not be a superuser: `CREATEROLE`, `CREATEDB` and what gives the
right to replicate are enough, as managed servers grant them. A second run changes nothing but the passwords, which
rotates them. `outbox roles --print` prints the statements instead, for somebody else to run.

No statement has a password, only what a server keeps of it (RFC 5803), so that no log has one. The migration that makes
a table grants what each role may do with it.

A database of another owner, such as that of an existing service (docs/existing-service.md), keeps its owner and its
grants.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import psycopg2
from psycopg2 import extensions
from psycopg2.extensions import make_dsn

from outbox.base.database import WAITS
from outbox.base.errors import Failure
from outbox.base.settings import Role, Settings, SinkRole, SourceRole, password_setting
from outbox.migrations.grants import Database

DATABASES: Sequence[Database] = ("source", "sink")
MAINTENANCE = "postgres"  # the database that an administrator connects to
SCRAM_ITERATIONS, SALT_BYTES = 4096, 16  # as Postgres
RDS_REPLICATION = "rds_replication"  # on servers of AWS membership in it is the right to replicate
# A service or a sink that went away with a transaction open holds nobody up for ever. Not for Debezium: its snapshot is
# one long transaction that may wait for Kafka. If policies of a table hide rows, the snapshot fails.
SET: Mapping[Role, str] = {
    SourceRole.APP: "idle_in_transaction_session_timeout = '60s'",
    SourceRole.CDC: "row_security = off",
    SinkRole.WRITER: "idle_in_transaction_session_timeout = '60s'",
}
SERVER = """
SELECT (SELECT rolsuper FROM pg_roles WHERE rolname = current_user),
       ARRAY(SELECT rolname::text FROM pg_roles),
       ARRAY(SELECT rolname::text FROM pg_roles WHERE rolreplication OR pg_has_role(rolname, to_regrole(%s), 'MEMBER')),
       (SELECT pg_get_userbyid(datdba)::text FROM pg_database WHERE datname = %s)
"""
# A grant by somebody who may not give the right is a warning.
MAY_CREATE = """
SELECT has_database_privilege(%(owner)s, current_database(), 'CREATE')
       AND has_schema_privilege(%(owner)s, 'public', 'CREATE')
"""


class Server(NamedTuple):
    """The state of a server before the statements. A fresh server has nothing of ours."""

    is_superuser: bool = False  # the administrator
    roles: Sequence[str] = ()
    replicating: Sequence[str] = ()
    owner: str | None = None  # of the database, if there is one


class Statement(NamedTuple):
    """SQL, and the database in which it is run, outside of a transaction."""

    database: str
    sql: str


class Administrator(NamedTuple):
    """Who makes the roles."""

    user: str
    password: str


def make(settings: Settings, database: Database, administrator: Administrator) -> None:
    """Make what is missing on a database's server, and set the passwords.

    Raises Failure if the server refuses the administrator, or a statement.
    """
    name = getattr(settings, f"{database}_db_url").name
    connections: dict[str, extensions.connection] = {}
    try:
        connections[MAINTENANCE] = _connect(settings, database, MAINTENANCE, administrator)
        with connections[MAINTENANCE].cursor() as cursor:
            cursor.execute(SERVER, [RDS_REPLICATION, name])
            server = Server(*cursor.fetchone() or ())
        for one in statements(settings, database, server):
            if one.database not in connections:
                connections[one.database] = _connect(settings, database, one.database, administrator)
            with connections[one.database].cursor() as cursor:
                cursor.execute(one.sql)
        if name in connections:
            with connections[name].cursor() as cursor:
                cursor.execute(MAY_CREATE, {"owner": settings.role_name(_owner(database))})
                ((may_create,),) = cursor.fetchall()
            if not may_create:
                raise Failure(
                    f"the roles of database {name}: {administrator.user} may not give its rights to others",
                    f"GRANT {server.owner} TO {administrator.user}, or let {server.owner} run it",
                    code="roles-refused",
                )
    except psycopg2.Error as error:
        reason = str(error).strip().partition("\n")[0]
        raise Failure(
            f"the roles of database {name}: {reason}",
            "let somebody who may create roles and databases, and give the right to replicate, run `outbox roles`, or "
            "what `outbox roles --print` prints",
            code="roles-refused",
        ) from error
    finally:
        for connection in connections.values():
            connection.close()


def statements(settings: Settings, database: Database, server: Server = Server()) -> Iterator[Statement]:  # noqa: B008
    """What makes the roles and the database on a server. Raises Failure for a password that is not ASCII."""
    roles: Sequence[Role] = [*(SourceRole if database == "source" else SinkRole)]
    names = {role: _name(settings.role_name(role)) for role in roles}
    owner, *others = names.values()
    database_name = str(getattr(settings, f"{database}_db_url").name)
    of_others = server.owner not in (None, settings.role_name(_owner(database)))

    def server_wide(sql: str) -> Statement:
        return Statement(MAINTENANCE, sql)

    for role, name in names.items():
        if settings.role_name(role) not in server.roles:
            yield server_wide(f"CREATE ROLE {name}")
        password = getattr(settings, password_setting(role)).get_secret_value()
        # Without a password it is a group: the role of an existing service becomes a member of it.
        if password or role is not SourceRole.APP:
            kept = verifier(password, settings.role_name(role))
            yield server_wide(f"ALTER ROLE {name} LOGIN PASSWORD {_literal(kept)}")
        if role in SET:
            yield server_wide(f"ALTER ROLE {name} SET {SET[role]}")
    if database == "source" and settings.role_name(SourceRole.CDC) not in server.replicating:
        is_rds = RDS_REPLICATION in server.roles
        right = f"GRANT {RDS_REPLICATION} TO {names[SourceRole.CDC]}"
        yield server_wide(right if is_rds else f"ALTER ROLE {names[SourceRole.CDC]} REPLICATION")
    if not server.is_superuser:  # a database's owner is a role that its maker could become
        yield server_wide(f"GRANT {owner} TO CURRENT_USER")
    if server.owner is None:
        # JSON needs UTF8, whatever the cluster's own encoding.
        yield server_wide(f"CREATE DATABASE {_name(database_name)} OWNER {owner} ENCODING 'UTF8' TEMPLATE template0")
    if of_others:
        # CREATE: a publication
        yield server_wide(f"GRANT CONNECT, CREATE ON DATABASE {_name(database_name)} TO {owner}")
        yield Statement(database_name, f"GRANT USAGE, CREATE ON SCHEMA public TO {owner}")
        yield Statement(database_name, f"GRANT USAGE ON SCHEMA public TO {', '.join(others)}")
    else:
        yield server_wide(f"REVOKE ALL ON DATABASE {_name(database_name)} FROM PUBLIC")
    yield server_wide(f"GRANT CONNECT ON DATABASE {_name(database_name)} TO {', '.join(others)}")
    if database == "sink":  # a sink copies each batch into a temporary table
        yield server_wide(f"GRANT TEMPORARY ON DATABASE {_name(database_name)} TO {names[SinkRole.WRITER]}")


def printed(settings: Settings, database: Database) -> Iterator[str]:
    """The statements for a server that has no such role, as lines. Without a password of its role, the service has its
    database already. Sinks in the service's database find it there.
    """
    is_existing = not settings.source_db_app_password.get_secret_value()
    if database == "sink":
        source, sink = settings.source_db_url, settings.sink_db_url
        is_existing = (source.server, source.name) == (sink.server, sink.name)
    connected = None
    for one in statements(settings, database, Server(owner="the service") if is_existing else Server()):
        if one.database != connected:
            yield f"-- in database {one.database}, on the server {getattr(settings, f'{database}_db_url').host}"
            connected = one.database
        if one.sql.endswith("REPLICATION"):
            yield f"-- on RDS and Aurora instead: GRANT {RDS_REPLICATION} TO the role"
        yield f"{one.sql};"


def verifier(password: str, role: str) -> str:
    """The SCRAM verifier of a password. A server checks logins with it, and nobody can log in with it.

    Raises Failure for a password that is empty or not ASCII: others would need SASLprep (RFC 4013).
    """
    if not password or not password.isascii():
        raise Failure(
            f"role {role} has no password, or one with characters beyond ASCII",
            "set another one",
            code="password-unfit",
        )
    salt = secrets.token_bytes(SALT_BYTES)
    salted = hashlib.pbkdf2_hmac("sha256", password.encode(), salt, SCRAM_ITERATIONS)
    stored = hashlib.sha256(hmac.digest(salted, b"Client Key", "sha256")).digest()
    server = hmac.digest(salted, b"Server Key", "sha256")
    salt_text, stored_text, server_text = (base64.b64encode(one).decode() for one in (salt, stored, server))
    return f"SCRAM-SHA-256${SCRAM_ITERATIONS}:{salt_text}${stored_text}:{server_text}"


def _connect(
    settings: Settings, database: Database, dbname: str, administrator: Administrator
) -> extensions.connection:
    """A connection of the administrator, outside of transactions."""
    server = settings.dsn(_owner(database))
    parameters = {**WAITS, **server, **administrator._asdict(), "dbname": dbname, "application_name": "outbox"}
    connection = psycopg2.connect(make_dsn(None, **parameters))
    connection.autocommit = True
    return connection


def _owner(database: Database) -> Role:
    return SourceRole.OWNER if database == "source" else SinkRole.OWNER


def _name(identifier: str) -> str:
    return '"' + identifier.replace('"', '""') + '"'


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
