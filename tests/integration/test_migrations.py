"""Both databases get the newest schema, wholly or not at all; each role may do what it has to, and no more."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

import alembic.command
import psycopg2
import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Connection, create_engine, text
from sqlalchemy.pool import NullPool

from outbox import migrate as migrations
from outbox.append import OUTBOX
from outbox.database import connect
from outbox.errors import Failure
from outbox.migrate import migrate
from outbox.settings import LedgerRole, Settings
from outbox.stack import ports
from outbox.stack.postgres import Postgres
from service import tables
from tests.ledger import query

APPEND = "INSERT INTO outbox (aggregatetype, aggregateid, type, payload) VALUES ('a', 'b', 'c', '{}')"


@pytest.fixture
def empty(databases: Settings, postgres: Postgres) -> Settings:
    """Settings of two databases that nothing has been migrated in."""
    for name, owner in ((databases.ledger_dbname, "ledger_owner"), (databases.balances_dbname, "balances_owner")):
        postgres.psql("DROP PUBLICATION IF EXISTS outbox", dbname=name)
        postgres.psql(f"DROP SCHEMA public CASCADE; CREATE SCHEMA public AUTHORIZATION {owner}", dbname=name)
        postgres.psql("GRANT USAGE ON SCHEMA public TO PUBLIC", dbname=name)
    return databases


@contextmanager
def owner_of(settings: Settings, database: str) -> Iterator[Connection]:
    """A connection as the owner of a database; nothing is committed."""
    engine = create_engine(
        "postgresql+psycopg2://", creator=lambda: connect(settings, migrations.OWNERS[database]), poolclass=NullPool
    )
    with engine.connect() as connection:
        yield connection


def test_a_first_run_applies_all_branches_and_a_second_one_nothing(empty: Settings) -> None:
    first = migrate(empty)
    assert {database: {revision.rpartition("_")[0] for revision in first[database]} for database in first} == {
        "ledger": {"ledger_machinery", "ledger_domain"},
        "balances": {"balances_machinery", "balances_domain"},
    }
    assert migrate(empty) == {"ledger": [], "balances": []}


def test_two_runs_at_once_wait_for_each_other(empty: Settings) -> None:
    # In two processes, as in life: Alembic's context is the whole process's.
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        both = list(pool.map(migrate, [empty, empty]))
    for database in ("ledger", "balances"):
        assert sorted(bool(applied[database]) for applied in both) == [False, True], both


def test_a_migration_that_fails_leaves_nothing_behind(empty: Settings) -> None:
    query(empty, "CREATE VIEW transfers AS SELECT 1")  # in the way of the second migration
    with pytest.raises(Failure, match='migrating database ledger: relation "transfers" already exists'):
        migrate(empty)
    assert query(empty, "SELECT tablename FROM pg_tables WHERE schemaname = 'public'") == []
    assert query(empty, "SELECT pubname FROM pg_publication") == []


def test_a_database_out_of_reach_is_named(databases: Settings) -> None:
    nowhere = databases.model_copy(update={"balances_port": ports.choose(0)[0]})
    with pytest.raises(Failure, match=rf"database {databases.balances_dbname} at 127.0.0.1:{nowhere.balances_port}"):
        migrate(nowhere)


def test_a_schema_of_newer_code_is_refused_by_migrate_and_good_enough_to_serve(databases: Settings) -> None:
    newer = "UPDATE alembic_version SET version_num = 'ledger_domain_9999' WHERE version_num LIKE 'ledger_domain_%'"
    query(databases, newer)
    with pytest.raises(Failure, match="ledger_domain_9999"):
        migrate(databases)
    with owner_of(databases, "ledger") as connection:
        assert migrations.is_current(connection, "ledger")


@pytest.mark.parametrize("database", ["ledger", "balances"])
def test_a_schema_that_lacks_a_migration_is_not_current(shared_databases: Settings, database: str) -> None:
    with owner_of(shared_databases, database) as connection:
        assert migrations.is_current(connection, database)
        connection.execute(text("DELETE FROM alembic_version"))
        assert not migrations.is_current(connection, database)
        connection.execute(text(f"INSERT INTO alembic_version VALUES ('{database}_machinery_0001')"))
        assert not migrations.is_current(connection, database)


def test_the_outbox_and_its_publication_are_never_dropped(databases: Settings) -> None:
    wanted = migrations.config("ledger")
    with owner_of(databases, "ledger") as connection:
        wanted.attributes["connection"] = connection
        wanted.attributes["on_version_apply"] = lambda **_: None
        with pytest.raises(Failure, match="not dropped by a migration"):
            alembic.command.downgrade(wanted, "base")
    assert query(databases, "SELECT pubname, pubinsert, pubupdate, pubdelete, pubtruncate FROM pg_publication") == [
        ("outbox", True, False, False, False)
    ]


def test_declared_and_migrated_tables_are_the_same(shared_databases: Settings) -> None:
    with owner_of(shared_databases, "ledger") as connection:
        assert differences(connection) == []


@pytest.mark.parametrize(
    "change",
    [
        "ALTER TABLE outbox ALTER traceparent SET NOT NULL",
        "ALTER TABLE outbox ALTER schema_version TYPE int",
        "ALTER TABLE outbox ALTER occurred_at SET DEFAULT now()",
        "ALTER TABLE accounts ADD note text",
        "DROP INDEX idempotency_keys_expires_at",
        "ALTER TABLE transfers DROP CONSTRAINT transfers_to_account_id_fkey",
        "CREATE TABLE more (id int)",
    ],
)
def test_a_difference_between_declared_and_migrated_tables_is_found(shared_databases: Settings, change: str) -> None:
    with owner_of(shared_databases, "ledger") as connection:
        connection.execute(text(change))
        assert len(differences(connection)) == 1


def differences(connection: Connection) -> list[Any]:
    """What a migration would have to do to make the tables that the code declares."""
    options = {"compare_type": True, "compare_server_default": True}
    context = MigrationContext.configure(connection, opts=options)
    declared = [OUTBOX.metadata, tables.metadata]
    found: list[Any] = compare_metadata(context, declared)  # type: ignore[arg-type]
    return found


TABLES = ("accounts", "transfers", "idempotency_keys", "outbox", "audit_accounts", "audit_events")
MAY = {
    LedgerRole.APP: {
        "accounts": {"SELECT", "INSERT"},  # and UPDATE of two columns
        "transfers": {"SELECT", "INSERT"},
        "idempotency_keys": {"SELECT", "INSERT", "UPDATE", "DELETE"},
        "outbox": {"INSERT"},
    },
    LedgerRole.CDC: {"outbox": {"SELECT"}},
    LedgerRole.PRUNER: {"outbox": {"SELECT", "INSERT", "DELETE"}},
    LedgerRole.AUDITOR: {"audit_accounts": {"SELECT"}, "audit_events": {"SELECT"}},
}


@pytest.mark.parametrize("role", MAY)
def test_a_role_may_do_what_it_has_to_and_no_more(shared_databases: Settings, role: LedgerRole) -> None:
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
    [
        (LedgerRole.APP, "SELECT FROM outbox"),
        (LedgerRole.APP, f"{APPEND} RETURNING id"),
        (LedgerRole.APP, "UPDATE outbox SET type = 'x'"),
        (LedgerRole.APP, "DELETE FROM outbox"),
        (LedgerRole.APP, "TRUNCATE outbox"),
        (LedgerRole.APP, "UPDATE accounts SET kind = 'system'"),
        (LedgerRole.APP, "DELETE FROM transfers"),
        (LedgerRole.APP, "SELECT FROM audit_events"),
        (LedgerRole.CDC, APPEND),
        (LedgerRole.CDC, "DELETE FROM outbox"),
        (LedgerRole.CDC, "SELECT FROM accounts"),
        (LedgerRole.PRUNER, "UPDATE outbox SET type = 'x'"),
        (LedgerRole.AUDITOR, "SELECT FROM outbox"),
        (LedgerRole.AUDITOR, "SELECT FROM accounts"),
        (LedgerRole.APP, "DROP PUBLICATION outbox"),
        (LedgerRole.APP, "CREATE TABLE mine (id int)"),
    ],
)
def test_what_a_role_may_not_do_is_refused(shared_databases: Settings, role: LedgerRole, statement: str) -> None:
    with pytest.raises(psycopg2.errors.InsufficientPrivilege):
        query(shared_databases, statement, role)


@pytest.mark.parametrize(
    ("role", "statement"),
    [
        (LedgerRole.APP, APPEND),
        (LedgerRole.APP, "UPDATE accounts SET balance_minor = 0, version = 0"),
        (LedgerRole.CDC, "SELECT FROM outbox"),
        (LedgerRole.PRUNER, f"{APPEND} RETURNING id"),
        (LedgerRole.PRUNER, "DELETE FROM outbox"),
        (LedgerRole.AUDITOR, "SELECT key, total, version FROM audit_accounts"),
        (LedgerRole.AUDITOR, "SELECT event_id, key, amount, version, occurred_at FROM audit_events"),
    ],
)
def test_what_a_role_has_to_do_it_can(shared_databases: Settings, role: LedgerRole, statement: str) -> None:
    query(shared_databases, statement, role)


def test_no_role_is_a_superuser_and_only_the_relay_may_replicate(shared_databases: Settings) -> None:
    found = query(
        shared_databases, "SELECT rolname FROM pg_roles WHERE rolname LIKE 'ledger%' AND (rolsuper OR rolbypassrls)"
    )
    assert found == []
    assert query(shared_databases, "SELECT rolname FROM pg_roles WHERE rolname LIKE 'ledger%' AND rolreplication") == [
        ("ledger_cdc",)
    ]


@pytest.mark.parametrize(
    "statement",
    [
        "INSERT INTO accounts (kind, currency, balance_minor) VALUES ('user', 'EUR', -1)",
        "INSERT INTO accounts (kind, currency) VALUES ('root', 'EUR')",
        "INSERT INTO accounts (kind, currency) VALUES ('user', 'euro')",
    ],
)
def test_the_database_itself_refuses_an_account_that_cannot_be(shared_databases: Settings, statement: str) -> None:
    with pytest.raises(psycopg2.errors.CheckViolation):
        query(shared_databases, statement, LedgerRole.APP)
