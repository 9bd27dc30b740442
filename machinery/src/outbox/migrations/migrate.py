"""Bring both databases to the newest schema, by Alembic.

Each database has a history with branches: ``machinery`` (the outbox, or what the sinks need), in the service's database
``http`` (what `outbox.http` needs), and ``domain`` (the project's own, in its folder ``migrations``). Revisions of
different branches never depend on each other's order. Each history is kept in a table of its own name: a service may
migrate its database by an Alembic of its own, and the sinks may be in that database too.

Each run also lets the outbox take the events that the project declares (`outbox.migrations.declared`), and repairs what
it has made before: the outbox's CHECKs and publication, and the grants of both databases. The revision alone does not
say that they are still as they were made. Migrations of ours grant nothing: this does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import alembic.command
import alembic.context
from alembic import op
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.script.revision import ResolutionError
from alembic.util import CommandError
from psycopg2 import extensions
from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

from outbox.base import project
from outbox.base.database import connect, connected, reason_of
from outbox.base.errors import Failure
from outbox.base.settings import Settings, SinkRole, SourceRole
from outbox.migrations import declared, grants, publication
from outbox.migrations.grants import Database

VERSIONS: Mapping[Database, str] = {"source": "outbox_version", "sink": "outbox_sink_version"}
ENCODING = "UTF8"
MINIMUM = 15  # the oldest version of Postgres that works
SERVER = """
SELECT current_database(), getdatabaseencoding(), current_setting('server_version'),
       current_setting('server_version_num')::int
"""
HERE = Path(__file__).resolve().parent

ROLES: dict[Database, type[SourceRole] | type[SinkRole]] = {"source": SourceRole, "sink": SinkRole}

# Functions of later versions of Postgres, for a server that does not have them: 15 to 17. They are made in the schema
# public. Postgres looks for a function in its own schema first. So after an upgrade of the server its own functions are
# called, except by a column's default, which calls the function that it was declared with.
FUNCTIONS: Mapping[str, str] = {
    # Milliseconds since 1970 in 48 bits, version, 12 bits of the fraction as in Postgres 18, variant, and random
    # bits: RFC 9562, sections 5.7 and 6.2 (method 3).
    "uuidv7()": """
        RETURNS uuid LANGUAGE sql VOLATILE PARALLEL SAFE AS $$
        SELECT encode(
                   substring(int8send(floor(now.ms)::bigint) FROM 3)
                   || substring(int4send(x'7000'::int + floor((now.ms - floor(now.ms)) * 4096)::int) FROM 3)
                   || substring(uuid_send(gen_random_uuid()) FROM 9),
                   'hex')::uuid
          FROM (SELECT extract(epoch FROM clock_timestamp()) * 1000 AS ms) AS now
        $$
    """,
    # NULL for a UUID of another variant than RFC 9562's.
    "uuid_extract_version(uuid)": """
        RETURNS smallint LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE AS $$
        SELECT CASE get_byte(uuid_send($1), 8) >> 6 WHEN 2 THEN (get_byte(uuid_send($1), 6) >> 4)::smallint END
        $$
    """,
}

# As Iceberg's JdbcCatalog and pyiceberg's SqlCatalog know them.
ICEBERG_CATALOG = """
CREATE TABLE public.iceberg_tables (
    catalog_name text NOT NULL,
    table_namespace text NOT NULL, -- the sink
    table_name text NOT NULL,
    metadata_location text, -- the newest version: a commit replaces it, if it is the one that the commit has read
    previous_metadata_location text,
    iceberg_type text,
    PRIMARY KEY (catalog_name, table_namespace, table_name)
);
CREATE TABLE public.iceberg_namespace_properties (
    catalog_name text NOT NULL, namespace text NOT NULL, property_key text NOT NULL, property_value text,
    PRIMARY KEY (catalog_name, namespace, property_key)
);
"""


class Migrated(NamedTuple):
    """The changes of a run."""

    applied: dict[Database, list[str]]
    """The revisions by database, in order."""
    events: declared.Change
    """The events that the outbox takes now and did not take before, and the other way round."""
    repaired: list[str]
    """Objects that somebody had changed or dropped, and that are as declared again."""


def migrate(settings: Settings, *, only_outbox: bool = False, only_declared: bool = False) -> Migrated:
    """Upgrade both databases to their heads, let the outbox take the declared events, and repair what was changed.

    Each database is upgraded in one transaction: wholly or not at all. Two at once wait for each other. With
    ``only_outbox``, for a service with migrations of its own, it makes the outbox, its publication and its grants in
    the service's database, and needs no other. With ``only_declared`` the outbox takes no other events
    (`outbox.migrations.declared`). Raises Failure if a declaration cannot be used; else Failure naming the database
    that cannot be reached, whose encoding is not UTF8, or whose migration failed.
    """
    wanted = declared.declared(settings)
    applied: dict[Database, list[str]] = {}
    applied["source"] = _upgrade(settings, "source", "machinery@head" if only_outbox else "heads")
    with _database_errors(settings, "source"):
        events = declared.guard(owner_engine(settings, "source"), wanted, only_declared=only_declared)
    repaired = [f"the constraint {name}" for name in events.repaired]
    repaired += _repair(settings, "source", is_new=bool(applied["source"]))
    if not only_outbox:
        applied["sink"] = _upgrade(settings, "sink", "heads")
        repaired += _repair(settings, "sink", is_new=bool(applied["sink"]))
    return Migrated(applied, events, repaired)


def wal_level(settings: Settings) -> str:
    """The setting of the service's server. Debezium can read nothing unless it is ``logical``."""
    with _owner(settings, "source") as cursor:
        cursor.execute("SHOW wal_level")
        ((found,),) = cursor.fetchall()
    return str(found)


def damages(settings: Settings, database: Database) -> list[str]:
    """Differences between a database and what this code makes, apart from the publication. `outbox migrate` repairs
    them.
    """
    changed = list[str]()
    if database == "source":
        with owner_engine(settings, database).connect() as connection:
            changed = [f"the constraint {name} is missing or was changed" for name in declared.read(connection).damaged]
    with _owner(settings, database) as cursor:
        missing = grants.missing(settings, cursor, database)
    return changed + [f"it needs {statement}" for statement in missing]


def owner_engine(settings: Settings, database: Database) -> Engine:
    """An engine that connects as the owner of a database, anew each time."""
    return create_engine(
        "postgresql+psycopg2://", creator=lambda: connect(settings, ROLES[database].OWNER), poolclass=NullPool
    )


def is_current(connection: Connection, database: Database, target: str = "heads") -> bool:
    """Whether the schema has every migration of this code up to the target, and the outbox takes every event that is
    declared.

    A schema with migrations that this code does not know is current too: migrations come before the code that needs
    them.
    """
    if database == "source" and not declared.has_declared(connection):
        return False
    scripts = ScriptDirectory.from_config(config(database))
    applied = MigrationContext.configure(connection, opts=_kept_in(database)).get_current_heads()
    try:
        return not any(scripts.iterate_revisions(target, applied, implicit_base=True))
    except ResolutionError:
        return True


def config(database: Database) -> Config:
    """Alembic's configuration of one database's history."""
    made = Config()
    made.set_main_option("path_separator", "newline")  # a folder's name may contain the others
    made.set_main_option("script_location", _escaped(HERE))
    folders = [HERE / database, project.current().migrations / database]
    made.set_main_option("version_locations", "\n".join(map(_escaped, folders)))
    return made


def run() -> None:
    """The work of ``env.py``: migrate on the connection that ``migrate`` has opened."""
    attributes = alembic.context.config.attributes
    alembic.context.configure(
        connection=attributes["connection"],
        on_version_apply=attributes["on_version_apply"],
        **_kept_in(attributes["database"]),
    )
    alembic.context.run_migrations()


def execute(sql: str) -> None:
    """Run SQL in a migration, one statement or several. Postgres gets the text as it is: nothing in it is replaced."""
    op.get_bind().exec_driver_sql(sql, execution_options={"no_parameters": True})


def role(name: str) -> str:
    """A role of the database that a migration is for, as SQL writes it: ``role("app")`` for ``GRANT … TO``.

    Raises Failure for a name that is no role of that database.
    """
    roles: dict[str, str] = alembic.context.config.attributes["roles"]
    if name not in roles:
        raise Failure(f"there is no role {name} of this database", f"use {', '.join(roles)}")
    return f'"{roles[name]}"'


def make_iceberg_catalog() -> None:
    """Make the catalog, in a migration of the sink database."""
    execute(ICEBERG_CATALOG)
    execute(f"GRANT SELECT, INSERT, UPDATE ON public.iceberg_tables TO {role('writer')}")
    execute(f"GRANT SELECT, INSERT ON public.iceberg_namespace_properties TO {role('writer')}")
    execute(f"GRANT SELECT ON public.iceberg_tables TO {role('auditor')}")


def require_server(connection: Connection) -> None:
    """Raises Failure if the server is too old, or if the database's encoding lacks characters that JSON may have."""
    name, encoding, version, number = connection.exec_driver_sql(SERVER).one()
    if number < MINIMUM * 10_000:
        raise Failure(
            f"database {name} is on Postgres {version}, and {MINIMUM} is the oldest that works",
            "upgrade the server",
            code="postgres-too-old",
        )
    if encoding != ENCODING:
        raise Failure(
            f"database {name} has the encoding {encoding}, which cannot hold every event",
            f"CREATE DATABASE … ENCODING '{ENCODING}' TEMPLATE template0, with a dump of this one if it has data",
            code="encoding-unfit",
        )


def _upgrade(settings: Settings, database: Database, target: str) -> list[str]:
    applied: list[str] = []
    wanted = config(database)
    with _database_errors(settings, database), owner_engine(settings, database).begin() as connection:
        require_server(connection)
        connection.execute(text(declared.TURN))
        _make_missing_functions(connection)
        wanted.attributes["database"] = database
        wanted.attributes["connection"] = connection
        wanted.attributes["roles"] = {one.value: settings.role_name(one) for one in ROLES[database]}
        wanted.attributes["on_version_apply"] = lambda step, **_: applied.extend(step.up_revision_ids)
        alembic.command.upgrade(wanted, target)
    return applied


def _kept_in(database: Database) -> dict[str, Any]:
    """Where Alembic keeps the history of a database."""
    return {"version_table": VERSIONS[database], "version_table_schema": "public"}


def _make_missing_functions(connection: Connection) -> None:
    """Make the functions that the server lacks, in the caller's transaction, and none that the database has already."""
    for signature, definition in FUNCTIONS.items():
        if connection.exec_driver_sql("SELECT to_regprocedure(%s)", (signature,)).scalar() is None:
            connection.exec_driver_sql(
                f"CREATE FUNCTION public.{signature} {definition}", execution_options={"no_parameters": True}
            )


def _repair(settings: Settings, database: Database, *, is_new: bool) -> list[str]:
    """Make publication and grants as they must be. Return what was wrong; of new tables nobody has granted anything."""
    with _owner(settings, database) as cursor:
        cursor.execute(declared.TURN)
        wrong = publication.repair(cursor) if database == "source" else None
        missing = grants.missing(settings, cursor, database)
        for statement in missing:
            cursor.execute(statement)
    return [*([] if wrong is None else [wrong]), *([] if is_new else missing)]


@contextmanager
def _owner(settings: Settings, database: Database) -> Iterator[extensions.cursor]:
    """A cursor in one transaction, as the owner of a database."""
    name = getattr(settings, f"{database}_db_url").name
    with connected(settings, ROLES[database].OWNER, f"database {name}") as connection, connection:
        yield connection.cursor()


@contextmanager
def _database_errors(settings: Settings, database: Database) -> Iterator[None]:
    """Convert the errors of a transaction inside the block to Failure."""
    try:
        yield
    except DBAPIError as error:
        name = getattr(settings, f"{database}_db_url").name
        raise Failure(
            f"migrating database {name}: {_said(error.orig)}",
            "the transaction was rolled back; correct the cause and run `outbox migrate` again",
            code="migration-failed",
        ) from error
    except CommandError as error:
        failed = f"migrating database {database}: {error}"
        raise Failure(failed, "deploy the code that has it", code="migration-failed") from error


def _said(error: object) -> str:
    """The text of an error; of one that rows are to blame for only its first line, because the rest quotes them."""
    assert isinstance(error, Exception)  # noqa: S101
    return reason_of(error) if str(getattr(error, "pgcode", "")).startswith(("22", "23")) else str(error).strip()


def _escaped(path: object) -> str:
    """Alembic interpolates ``%`` in its options."""
    return str(path).replace("%", "%%")
