"""The ledger's tables: declared as migrated, closed to roles that have no business there, and checked by themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg2
import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from outbox.base.settings import Settings, SourceRole
from outbox.http.idempotency import KEYS
from outbox.migrations.migrate import VERSION_TABLE, owner_engine
from outbox.testing.queries import query
from outbox.writing.append import OUTBOX
from sqlalchemy import Connection, text

from service import tables


@pytest.fixture
def owner(shared_databases: Settings) -> Iterator[Connection]:
    """A connection as the owner of the source database; nothing is committed."""
    with owner_engine(shared_databases, "source").connect() as connection:
        yield connection


def differences(connection: Connection) -> list[Any]:
    """What a migration would have to do to make the tables that the code declares."""
    options = {"compare_type": True, "compare_server_default": True, "version_table": VERSION_TABLE}
    context = MigrationContext.configure(connection, opts=options)
    declared = [OUTBOX.metadata, KEYS.metadata, tables.metadata]
    found: list[Any] = compare_metadata(context, declared)  # type: ignore[arg-type]
    return found


# SQLAlchemy 2.1 reflects a constraint that is NOT VALID with a warning about its own keyword.
reflecting = pytest.mark.filterwarnings("ignore:Can't validate argument 'dialect_options'")


@reflecting
def test_declared_and_migrated_tables_are_the_same(owner: Connection) -> None:
    assert differences(owner) == []


@reflecting
@pytest.mark.parametrize(
    "change",
    [
        "ALTER TABLE accounts ADD note text",
        "ALTER TABLE transfers DROP CONSTRAINT transfers_to_account_id_fkey",
        "CREATE TABLE more (id int)",
    ],
)
def test_a_difference_between_declared_and_migrated_tables_is_found(owner: Connection, change: str) -> None:
    owner.execute(text(change))
    assert len(differences(owner)) == 1


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
