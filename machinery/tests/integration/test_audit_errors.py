"""`outbox check` reads a database that fails: the failure says why, and its remedy fits."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from outbox.audit import rows
from outbox.audit.source import snapshot
from outbox.base.database import connect
from outbox.base.settings import Settings, SinkRole
from outbox.sink.comparison_files import Comparison
from outbox_lab.testing.failures import raises


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
        raises(code, databases.sink_db_url.name, f"— {remedy}"),
        snapshot(databases, SinkRole.AUDITOR) as connection,
        connection.cursor() as cursor,
    ):
        cursor.execute(query)


@pytest.mark.parametrize(
    ("query", "problem", "remedy"),
    [
        ("SELECT key, total FROM nothing", "does not exist", "`outbox migrate`"),
        ("SELECT 1 AS key", "[sink] has no column sink, total", "let it return key, sink, total"),
        ("SELECT 'x' AS sink, 1 AS key, 1 AS total FROM", "syntax error", "correct the query"),
        ("SELECT name AS sink, 1 AS key, 1 / 0 AS total FROM sinks", "division by zero", "correct the query"),
        ("SELECT sink, 1 AS key, 1 AS total FROM processed_events", "permission denied", "GRANT SELECT to"),
    ],
)
def test_a_query_that_cannot_be_used_is_named(databases: Settings, query: str, problem: str, remedy: str) -> None:
    with closing(connect(databases, SinkRole.OWNER)) as owner, owner, owner.cursor() as cursor:
        cursor.execute("INSERT INTO sinks (name, epoch) VALUES ('dedup', 1)")
    with (
        raises("comparison-unusable", "totals.sql", problem, remedy),
        snapshot(databases, SinkRole.AUDITOR) as connection,
    ):
        list(rows.read_sinks(connection, Comparison(Path("totals.sql"), (), "", query)))


def test_rows_of_a_key_are_added_up_exactly(databases: Settings) -> None:
    query = "SELECT 'a' AS key, total, version FROM (VALUES (1e30, 1), (0.1, 3), (NULL, 2)) AS found (total, version)"
    with snapshot(databases, SinkRole.AUDITOR) as connection:
        found = list(rows.read_source(connection, Comparison(Path("totals.sql"), (), query)))
    assert found == [("", "a", 3, "1000000000000000000000000000000.1")]
