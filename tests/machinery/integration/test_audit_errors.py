"""`outbox check` reads a database that fails: the failure says why, and its remedy fits."""

from __future__ import annotations

import pytest

from outbox.audit.source import snapshot
from outbox.base.settings import Settings, SinkRole
from tests.support.failures import raises


@pytest.mark.parametrize(
    ("query", "code", "remedy"),
    [
        ("SELECT FROM nothing", "database-not-migrated", "`outbox migrate`"),
        ("SELECT FROM processed_events", "database-refused", "correct the cause and run the command again"),
        ("SELECT pg_terminate_backend(pg_backend_pid())", "database-connection-lost", "run the command again"),
    ],
)
def test_error_while_reading_has_the_remedy_of_its_cause(
    databases: Settings, query: str, code: str, remedy: str
) -> None:
    with (
        raises(code, databases.sink_db_name, f"— {remedy}"),
        snapshot(databases, SinkRole.AUDITOR) as connection,
        connection.cursor() as cursor,
    ):
        cursor.execute(query)
