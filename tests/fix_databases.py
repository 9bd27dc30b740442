"""Fresh databases for each test: clones of a pair that was migrated once."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from outbox.base.settings import Settings
from outbox.migrations.migrate import migrate
from outbox.stack.postgres import Postgres
from outbox.stack.stack import Stack


@pytest.fixture(scope="session")
def template(postgres_stack: Stack) -> Settings:
    """The migrated pair that is cloned. Nobody connects to it: Postgres refuses to copy a database in use."""
    settings = postgres_stack.settings
    migrate(settings)
    return settings


@pytest.fixture
def databases(template: Settings, postgres: Postgres) -> Iterator[Settings]:
    """Settings of a ledger and a balances database, migrated and empty, of this test alone."""
    with clone(template, postgres) as settings:
        yield settings


@pytest.fixture(scope="module")
def shared_databases(template: Settings, postgres: Postgres) -> Iterator[Settings]:
    """The same for the tests of a module that do not disturb each other: a pair of their own costs half a second."""
    with clone(template, postgres) as settings:
        yield settings


@contextmanager
def clone(template: Settings, postgres: Postgres) -> Iterator[Settings]:
    """A copy of the template, which is dropped at the end."""
    suffix = uuid.uuid4().hex[:8]
    ledger, balances = f"ledger_{suffix}", f"balances_{suffix}"
    for name, source in ((ledger, template.source_db_name), (balances, template.sink_db_name)):
        postgres.psql(f"CREATE DATABASE {name} TEMPLATE {source} OWNER {source}_owner")
        postgres.psql(f"REVOKE ALL ON DATABASE {name} FROM PUBLIC")
    postgres.psql(f"GRANT CONNECT ON DATABASE {ledger} TO ledger_app, ledger_cdc, ledger_pruner, ledger_auditor")
    postgres.psql(f"GRANT CONNECT, TEMPORARY ON DATABASE {balances} TO balances_writer")
    postgres.psql(f"GRANT CONNECT ON DATABASE {balances} TO balances_pruner, balances_auditor")
    yield template.model_copy(update={"source_db_name": ledger, "sink_db_name": balances})
    for name in (ledger, balances):
        postgres.psql(f"DROP DATABASE {name} WITH (FORCE)")
