"""The ledger's tables: declared as migrated, closed to roles that have no business there, and checked by themselves."""

from __future__ import annotations

from typing import Any

import psycopg2
import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from outbox import Settings
from outbox_lab.testing import SourceRole, query
from sqlalchemy import Engine

from service import tables

MACHINERY = {"idempotency_keys", "outbox", "outbox_version"}


def differences(engine: Engine) -> list[Any]:
    """Changes that a migration needs to make the tables that the code declares."""
    options = {
        "compare_type": True,
        "compare_server_default": True,
        "include_name": lambda name, kind, _: kind != "table" or name not in MACHINERY,
    }
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts=options)
        found: list[Any] = compare_metadata(context, tables.metadata)
    return found


# SQLAlchemy 2.1 reflects a constraint that is NOT VALID with a warning about its own keyword.
reflecting = pytest.mark.filterwarnings("ignore:Can't validate argument 'dialect_options'")


@reflecting
def test_declared_and_migrated_tables_are_the_same(engine: Engine) -> None:
    assert differences(engine) == []


@reflecting
@pytest.mark.parametrize(
    "change",
    [
        "ALTER TABLE accounts ADD note text",
        "ALTER TABLE transfers DROP CONSTRAINT transfers_to_account_id_fkey",
        "CREATE TABLE more (id int)",
    ],
)
def test_a_difference_between_declared_and_migrated_tables_is_found(
    engine: Engine, databases: Settings, change: str
) -> None:
    query(databases, change)
    assert len(differences(engine)) == 1


@pytest.mark.parametrize(
    ("role", "statement"),
    [
        (SourceRole.APP, "UPDATE accounts SET kind = 'system'"),
        (SourceRole.APP, "DELETE FROM accounts"),
        (SourceRole.APP, "DELETE FROM transfers"),
        (SourceRole.APP, "UPDATE transfers SET amount_minor = 1"),
        (SourceRole.APP, "UPDATE accounts SET label = ''"),
        (SourceRole.APP, "SELECT FROM source_totals"),
        (SourceRole.APP, "SELECT FROM source_accounts"),
        (SourceRole.CDC, "SELECT FROM accounts"),
        (SourceRole.PRUNER, "SELECT FROM accounts"),
        (SourceRole.AUDITOR, "SELECT FROM accounts"),
    ],
)
def test_what_a_role_may_not_do_is_refused(shared_databases: Settings, role: SourceRole, statement: str) -> None:
    with pytest.raises(psycopg2.errors.InsufficientPrivilege):
        query(shared_databases, statement, role)


@pytest.mark.parametrize(
    ("role", "statement"),
    [
        (SourceRole.APP, "UPDATE accounts SET balance_minor = 0, version = 0"),
        (SourceRole.APP, "UPDATE accounts SET status = 'open', account_version = 0"),
        (SourceRole.AUDITOR, "SELECT key, total, version FROM source_totals"),
        (SourceRole.AUDITOR, "SELECT key, version, label, status, transfers, turnover FROM source_accounts"),
    ],
)
def test_what_a_role_has_to_do_it_can(shared_databases: Settings, role: SourceRole, statement: str) -> None:
    query(shared_databases, statement, role)


@pytest.mark.parametrize(
    "statement",
    [
        "INSERT INTO accounts (kind, currency, balance_minor) VALUES ('user', 'EUR', -1)",
        "INSERT INTO accounts (kind, currency) VALUES ('root', 'EUR')",
        "INSERT INTO accounts (kind, currency) VALUES ('user', 'euro')",
        "INSERT INTO accounts (kind, currency, status) VALUES ('user', 'EUR', 'lost')",
        "INSERT INTO accounts (kind, currency, status, balance_minor) VALUES ('user', 'EUR', 'closed', 1)",
        "INSERT INTO accounts (kind, currency, label) VALUES ('user', 'EUR', repeat('x', 101))",
    ],
)
def test_the_database_itself_refuses_an_account_that_cannot_be(shared_databases: Settings, statement: str) -> None:
    with pytest.raises(psycopg2.errors.CheckViolation):
        query(shared_databases, statement, SourceRole.APP)
