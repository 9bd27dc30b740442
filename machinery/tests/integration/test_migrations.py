"""Both databases get the newest schema, wholly or not at all; each role may do what it has to, and no more."""

from __future__ import annotations

import multiprocessing
import time
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import psycopg2
import pytest
from psycopg2 import extensions
from sqlalchemy import Connection, create_engine, text
from sqlalchemy.pool import NullPool

from outbox.audit.doctor import examine
from outbox.base import project
from outbox.base.database import connect
from outbox.base.settings import DatabaseUrl, Role, Secret, Settings, SinkRole, SourceRole
from outbox.migrations import migrate, roles
from outbox.migrations.grants import Database
from outbox.migrations.roles import Administrator
from outbox.sink.remembering import fence
from outbox_lab.stack.postgres import Postgres
from outbox_lab.stack.process import Process
from outbox_lab.stack.stack import Stack
from outbox_lab.testing.command import run
from outbox_lab.testing.failures import raises
from outbox_lab.testing.fixtures.stack import private_stack
from outbox_lab.testing.helpers import query
from outbox_lab.testing.homes import Homes
from tests.support.declared import declare, work_for

APPEND = "INSERT INTO outbox (aggregatetype, aggregateid, type, payload) VALUES ('order', 'b', 'placed', '{}')"


@pytest.fixture
def empty(databases: Settings, postgres: Postgres) -> Settings:
    """Settings of two databases that nothing has been migrated in."""
    owners: dict[str, Role] = {
        databases.source_db_url.name: SourceRole.OWNER,
        databases.sink_db_url.name: SinkRole.OWNER,
    }
    for name, role in owners.items():
        owner = databases.role_name(role)
        postgres.psql("DROP PUBLICATION IF EXISTS outbox", dbname=name)
        postgres.psql(f"DROP SCHEMA public CASCADE; CREATE SCHEMA public AUTHORIZATION {owner}", dbname=name)
        postgres.psql("GRANT USAGE ON SCHEMA public TO PUBLIC", dbname=name)
    return databases


@contextmanager
def owner_of(settings: Settings, database: Database) -> Iterator[Connection]:
    """A connection as the owner of a database; nothing is committed."""
    engine = create_engine(
        "postgresql+psycopg2://", creator=lambda: connect(settings, migrate.ROLES[database].OWNER), poolclass=NullPool
    )
    with engine.connect() as connection:
        yield connection


def test_a_first_run_applies_all_branches_and_a_second_one_nothing(empty: Settings) -> None:
    first = migrate.migrate(empty)
    assert {name: {revision.rpartition("_")[0] for revision in applied} for name, applied in first.applied.items()} == {
        "source": {"source_machinery", "source_http", "source_domain"},
        "sink": {"sink_machinery", "sink_domain"},
    }
    assert set(first.events.added) > {"item.picked.v1", "order.placed.v2"}
    assert first.repaired == []
    assert migrate.migrate(empty) == ({"source": [], "sink": []}, ([], [], []), [])


def test_two_runs_at_once_wait_for_each_other(empty: Settings) -> None:
    # In two processes, as in life: Alembic's context is the whole process's.
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        both = list(pool.map(migrate.migrate, [empty, empty]))
    for database in ("source", "sink"):
        assert sorted(bool(one.applied[database]) for one in both) == [False, True], both


def test_a_migration_that_fails_leaves_nothing_behind(empty: Settings) -> None:
    query(empty, "CREATE VIEW items AS SELECT 1")  # in the way of the second migration
    with raises("migration-failed", f"database {empty.source_db_url.name}", 'relation "items" already exists'):
        migrate.migrate(empty)
    assert query(empty, "SELECT tablename FROM pg_tables WHERE schemaname = 'public'") == []
    assert query(empty, "SELECT pubname FROM pg_publication") == []


PLAIN = """
CREATE TABLE plain (note jsonb);
INSERT INTO plain VALUES ('{"a":true, "b": "{app} 50% %s :name"}'::jsonb);
"""
PLAIN_MIGRATION = f"""
from outbox.migrations import execute, role

revision, down_revision, branch_labels, depends_on = "source_domain_0001", None, ("domain",), None


def upgrade():
    execute({PLAIN!r})
    execute(f"GRANT SELECT ON plain TO {{role('app')}}")
"""


def test_sql_of_a_migration_stays_as_it_is_written(
    empty: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "migrations" / "source" / "0001_plain.py"
    file.parent.mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text("[tool.outbox]\n")
    monkeypatch.setenv(project.VARIABLE, str(tmp_path))
    file.write_text(PLAIN_MIGRATION.replace("'app'", "'writer'"))
    with raises("failed", "owner, app, cdc, pruner, auditor"):
        migrate.migrate(empty)
    file.write_text(PLAIN_MIGRATION)
    migrate.migrate(empty)
    [(note,)] = query(empty, "SELECT note FROM plain", SourceRole.APP)
    assert note == {"a": True, "b": "{app} 50% %s :name"}


@pytest.mark.parametrize(("database", "encoding"), [("source", "LATIN1"), ("sink", "SQL_ASCII")])
def test_an_encoding_that_cannot_hold_json_is_named(
    databases: Settings, superuser: extensions.cursor, database: Database, encoding: str
) -> None:
    url: DatabaseUrl = getattr(databases, f"{database}_db_url")
    name = f"{url.name}_{encoding.lower()}"
    owner = databases.role_name(migrate.ROLES[database].OWNER)
    superuser.execute(f"CREATE DATABASE {name} OWNER {owner} ENCODING '{encoding}' LOCALE 'C' TEMPLATE template0")
    unfit = databases.replace(**{f"{database}_db_url": url.replace(name=name)})
    try:
        with raises("encoding-unfit", f"database {name} has the encoding {encoding}", "ENCODING 'UTF8'"):
            migrate.migrate(unfit)
        hop = {"source": "source-db", "sink": "sink-db"}[database]
        assert "encoding-unfit" in {one.code for one in examine(unfit, hop)}
    finally:
        superuser.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.mark.parametrize("database", ["source", "sink"])
def test_a_server_that_is_too_old_is_named(
    databases: Settings, monkeypatch: pytest.MonkeyPatch, database: Database
) -> None:
    monkeypatch.setattr(migrate, "MINIMUM", 99)
    with raises("postgres-too-old"):
        migrate.migrate(databases)
    assert "postgres-too-old" in [one.code for one in examine(databases, f"{database}-db")]


class Replica(Postgres):
    """A server that writes too little into its log for a logical slot."""

    def options(self) -> Mapping[str, str | int | Path]:
        return {**super().options(), "wal_level": "replica"}


class ReplicaStack(Stack):
    """A stack with such a server."""

    def part(self, name: str) -> Process:
        return Replica(self.settings) if name == "postgres" else super().part(name)


def test_a_server_without_logical_decoding_is_reported(homes: Homes) -> None:
    stack = ReplicaStack(private_stack(homes.new("replica")).settings)
    stack.up(only=["postgres"])
    try:
        assert "lacking    wal_level is replica" in run(stack.settings, "migrate")
        assert "wal-level-not-logical" in [one.code for one in examine(stack.settings, "source-db")]
    finally:
        stack.down(gently=False)


def test_ids_of_the_server_are_uuids_of_version_7_in_order_of_time(shared_databases: Settings) -> None:
    """On a server without functions for them, those of `outbox.migrations.migrate`."""
    made = "SELECT id::text, uuid_extract_version(id) FROM (SELECT uuidv7() AS id FROM generate_series(1, 5000)) AS one"
    found = [(uuid.UUID(one), version) for one, version in query(shared_databases, made, SourceRole.APP)]
    assert {(one.version, one.variant, version) for one, version in found} == {(7, uuid.RFC_4122, 7)}
    assert len({*found}) == len(found)
    moments = [one.int >> 80 for one, _ in found]
    assert moments == sorted(moments)
    assert time.time() - 60 < moments[0] / 1000 <= moments[-1] / 1000 < time.time() + 60


def test_a_function_of_the_service_is_left_as_it_is(empty: Settings) -> None:
    body = "CREATE FUNCTION public.uuidv7() RETURNS uuid LANGUAGE sql AS 'SELECT gen_random_uuid()'"
    query(empty, body, SourceRole.OWNER)
    migrate.migrate(empty)
    source = "SELECT prosrc FROM pg_proc WHERE oid = to_regprocedure('public.uuidv7()')"
    assert query(empty, source) == [("SELECT gen_random_uuid()",)]


def test_migrate_refuses_a_newer_schema_and_serve_accepts_it(databases: Settings) -> None:
    newer = "UPDATE outbox_version SET version_num = 'source_domain_9999' WHERE version_num LIKE 'source_domain_%'"
    query(databases, newer)
    with raises("migration-failed", "source_domain_9999"):
        migrate.migrate(databases)
    with owner_of(databases, "source") as connection:
        assert migrate.is_current(connection, "source")


@pytest.mark.parametrize("database", ["source", "sink"])
def test_a_schema_that_lacks_a_migration_is_not_current(shared_databases: Settings, database: Database) -> None:
    with owner_of(shared_databases, database) as connection:
        assert migrate.is_current(connection, database)
        connection.execute(text(f"DELETE FROM {migrate.VERSIONS[database]}"))
        assert not migrate.is_current(connection, database)
        connection.execute(text(f"INSERT INTO {migrate.VERSIONS[database]} VALUES ('{database}_machinery_0001')"))
        assert not migrate.is_current(connection, database)


TABLES = ("items", "idempotency_keys", "outbox", "source_totals")
MAY = {
    SourceRole.APP: {
        "items": {"SELECT", "INSERT"},  # and UPDATE of two columns
        "idempotency_keys": {"SELECT", "INSERT", "UPDATE", "DELETE"},
        "outbox": {"INSERT"},
    },
    SourceRole.CDC: {"outbox": {"SELECT"}},
    SourceRole.PRUNER: {"outbox": {"SELECT", "INSERT", "DELETE"}},
    SourceRole.AUDITOR: {"outbox": {"SELECT"}, "source_totals": {"SELECT"}},
}


@pytest.mark.parametrize("role", MAY)
def test_a_role_may_do_what_it_has_to_and_no_more(shared_databases: Settings, role: SourceRole) -> None:
    privileges = ("SELECT", "INSERT", "UPDATE", "DELETE", "TRUNCATE", "REFERENCES", "TRIGGER")
    found = query(
        shared_databases,
        """SELECT relation, privilege
             FROM unnest(%s) AS relation, unnest(%s) AS privilege
            WHERE has_table_privilege(relation, privilege)""",
        role,
        [list(TABLES), list(privileges)],
    )
    assert set(found) == {(table, privilege) for table, all_ in MAY[role].items() for privilege in all_}
    assert query(shared_databases, "SELECT has_schema_privilege('public', 'CREATE')", role) == [(False,)]


@pytest.mark.parametrize(
    ("role", "statement"),
    [  # beside what the test above shows of all roles
        (SourceRole.APP, f"{APPEND} RETURNING id"),
        (SourceRole.APP, "UPDATE items SET unit = 'LTR'"),
        (SourceRole.APP, "DROP PUBLICATION outbox"),
    ],
)
def test_what_a_role_may_not_do_is_refused(shared_databases: Settings, role: SourceRole, statement: str) -> None:
    with pytest.raises(psycopg2.errors.InsufficientPrivilege):
        query(shared_databases, statement, role)


# `outbox roles` as the administrator of a managed server, who is no superuser, and as printed SQL -----------------


REPLICATES_SINCE = 160_000  # somebody who is no superuser may give the right to replicate


@pytest.fixture
def managed(template: Settings, superuser: extensions.cursor) -> Iterator[tuple[Settings, Administrator]]:
    """Settings of databases and roles that do not exist yet, and an administrator."""
    suffix = uuid.uuid4().hex[:8]
    settings = template.replace(
        source_db_url=template.source_db_url.replace(name=f"source_{suffix}"),
        sink_db_url=template.sink_db_url.replace(name=f"sink_{suffix}"),
        source_db_role_prefix=f"source_{suffix}",
        sink_db_role_prefix=f"sink_{suffix}",
    )
    admin = Administrator(f"admin_{suffix}", "of-the-admin")
    superuser.execute(f"CREATE ROLE {admin.user} LOGIN CREATEROLE CREATEDB REPLICATION PASSWORD '{admin.password}'")
    yield settings, admin
    for name in (settings.source_db_url.name, settings.sink_db_url.name):
        superuser.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")
    for role in (*SourceRole, *SinkRole):
        superuser.execute(f"DROP ROLE IF EXISTS {settings.role_name(role)}")
    superuser.execute(f"DROP OWNED BY {admin.user}; DROP ROLE {admin.user}")


@pytest.fixture(params=["attribute", "as on RDS"])
def replication(
    request: pytest.FixtureRequest, managed: tuple[Settings, Administrator], superuser: extensions.cursor
) -> Iterator[str]:
    """How the administrator gives the right to replicate."""
    superuser.execute("SELECT current_setting('server_version_num')::int")
    if request.param == "attribute":
        if superuser.fetchall()[0][0] < REPLICATES_SINCE:
            pytest.skip("only a superuser may on this server")
        yield "SELECT rolreplication FROM pg_roles WHERE rolname = %s"
        return
    superuser.execute(f"CREATE ROLE {roles.RDS_REPLICATION}")
    superuser.execute(f"GRANT {roles.RDS_REPLICATION} TO {managed[1].user} WITH ADMIN OPTION")
    yield f"SELECT pg_has_role(%s, '{roles.RDS_REPLICATION}', 'MEMBER')"
    superuser.execute(f"DROP ROLE {roles.RDS_REPLICATION}")


def test_an_administrator_who_is_no_superuser_makes_everything(
    managed: tuple[Settings, Administrator], replication: str
) -> None:
    settings, admin = managed
    for database in (*roles.DATABASES, *roles.DATABASES):  # a second run, too
        roles.make(settings, database, admin)
    assert [*migrate.migrate(settings).applied] == [*roles.DATABASES]
    for role in (*SourceRole, *SinkRole):
        connect(settings, role).close()
    assert [one for one in examine(settings, "source-db", "sink-db") if not one.is_ok] == []
    assert query(settings, replication, SourceRole.OWNER, [settings.role_name(SourceRole.CDC)]) == [(True,)]


def test_the_sinks_may_be_in_the_database_of_the_service(
    managed: tuple[Settings, Administrator], postgres: Postgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    declare(work_for(tmp_path / "project", monkeypatch), "order", "placed")
    settings = managed[0].replace(sink_db_url=managed[0].source_db_url)
    for database in (*roles.DATABASES, *roles.DATABASES):
        roles.make(settings, database, Administrator("postgres", postgres.password))
    assert run(settings, "roles", "--print").count("CREATE DATABASE") == 1
    assert all(migrate.migrate(settings).applied.values())
    assert not any(migrate.migrate(settings).applied.values())
    assert [one for one in examine(settings, "source-db", "sink-db") if not one.is_ok] == []
    query(settings, APPEND, SourceRole.APP)
    with closing(connect(settings, SinkRole.WRITER)) as connection:
        fence.acquire(connection, "receipts")
    assert query(settings, "SELECT name FROM sinks", SinkRole.AUDITOR) == [("receipts",)]


def test_an_administrator_whom_the_owner_of_the_database_has_given_nothing_is_told(
    managed: tuple[Settings, Administrator], superuser: extensions.cursor
) -> None:
    settings, admin = managed
    name = settings.sink_db_url.name
    superuser.execute(f"CREATE DATABASE {name}")
    with raises("roles-refused", f"GRANT postgres TO {admin.user}"):
        roles.make(settings, "sink", admin)


@pytest.mark.parametrize("password", ["", "pässword"])
def test_a_password_that_no_server_would_keep_as_we_do_is_refused(template: Settings, password: str) -> None:
    wrong = template.replace(sink_db_owner_password=Secret(password))
    with raises("password-unfit"):
        list(roles.statements(wrong, "sink"))


def test_an_administrator_without_the_right_is_told(
    managed: tuple[Settings, Administrator], superuser: extensions.cursor
) -> None:
    settings, admin = managed
    superuser.execute(f"ALTER ROLE {admin.user} NOCREATEROLE")
    with raises("roles-refused", "permission denied to create role"):
        roles.make(settings, "source", admin)
    with raises("roles-refused"):
        roles.make(settings, "source", Administrator(admin.user, "wrong"))


def test_printed_sql_makes_the_same(
    managed: tuple[Settings, Administrator], postgres: Postgres, tmp_path: Path
) -> None:
    settings, _ = managed
    printed = run(settings, "roles", "--print")
    passwords = {value for name, value in settings.as_env().items() if name.endswith("_PASSWORD") and value}
    assert not [password for password in passwords if password in printed]
    file = tmp_path / "roles.sql"
    file.write_text(printed)
    postgres.run_psql(["-d", "postgres", "-f", str(file)])
    migrate.migrate(settings)
    for role in (*SourceRole, *SinkRole):
        connect(settings, role).close()
