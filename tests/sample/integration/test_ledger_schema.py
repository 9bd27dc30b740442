"""What the ledger's database refuses by itself."""

from __future__ import annotations

import psycopg2
import pytest

from outbox.base.settings import Settings, SourceRole
from tests.support.queries import query


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
        query(shared_databases, statement, SourceRole.APP)
