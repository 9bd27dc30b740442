"""`outbox sql`: what it prints, what the server refuses to the auditor, and how it ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest

from outbox.base.settings import Settings, SourceRole
from outbox_lab.testing import wait_for
from outbox_lab.testing.command import environment, outbox, run
from outbox_lab.testing.helpers import query
from tests.support.paths import ROOT

EVENT = "INSERT INTO outbox (aggregatetype, aggregateid, type, payload) VALUES ('item', 'a', 'received', '{}')"


def piped(settings: Settings, statements: str) -> subprocess.CompletedProcess[str]:
    """`outbox sql source` with statements on its standard input."""
    return subprocess.run(
        [sys.executable, "-m", "outbox", "sql", "source"],
        input=statements,
        env=environment(settings.home, **settings.as_env()),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_rows_are_a_table_or_json_with_exact_values(databases: Settings) -> None:
    statement = "SELECT 1.10 AS a, NULL AS b, '{\"x\": [1]}'::jsonb AS c, true AS d, E'two\\nlines' AS e;"
    heading, row = run(databases, "sql", "sink", statement).splitlines()
    assert heading.split() == ["a", "b", "c", "d", "e"]
    assert row.split("  ")[0] == "1.10"
    assert row.endswith("two\\nlines")
    printed = run(databases, "sql", "sink", "--json", statement)
    assert json.loads(printed) == [{"a": 1.1, "b": None, "c": {"x": [1]}, "d": True, "e": "two\nlines"}]
    assert '"a":1.10' in printed
    assert json.loads(run(databases, "sql", "sink", "--json", "SELECT 1 WHERE false")) == []
    assert json.loads(run(databases, "sql", "sink", "--json", "SHOW TimeZone")) == [{"TimeZone": "UTC"}]


@pytest.mark.parametrize(
    "statement",
    ["DELETE FROM outbox", "SET TRANSACTION READ WRITE; DELETE FROM outbox", "SELECT 1; DELETE FROM outbox", "SELEC"],
)
def test_server_refuses_the_auditor_s_changes_in_one_line(databases: Settings, statement: str) -> None:
    query(databases, EVENT)
    done = outbox("sql", "source", statement, home=databases.home, **databases.as_env())
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert query(databases, "SELECT count(*) FROM outbox") == [(1,)]


def test_owner_s_changes_are_committed(databases: Settings) -> None:
    query(databases, EVENT)
    assert run(databases, "sql", "source", "--role", "owner", "DELETE FROM outbox").strip() == "DELETE 1"
    assert query(databases, "SELECT count(*) FROM outbox") == [(0,)]


def test_ctrl_c_cancels_the_statement(databases: Settings) -> None:
    running = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE '%pg_sleep(7777)' AND state = 'active'"

    def count() -> int:
        return int(query(databases, f"{running} AND datname = current_database()", SourceRole.AUDITOR)[0][0])

    with subprocess.Popen(
        [sys.executable, "-m", "outbox", "sql", "source", "SELECT pg_sleep(7777)"],
        env=environment(databases.home, **databases.as_env()),
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            wait_for("the statement to run", lambda: count() == 1, timeout_s=60)
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode in (1, 130)
    assert len(said.splitlines()) <= 1
    wait_for("the statement to end", lambda: count() == 0, timeout_s=60)


def test_without_a_statement_psql_opens_as_the_read_only_auditor(databases: Settings) -> None:
    query(databases, EVENT)
    done = piped(databases, "SHOW default_transaction_read_only; SELECT current_user;\nDELETE FROM outbox;")
    assert [word for word in done.stdout.split() if word in ("on", databases.role_name(SourceRole.AUDITOR))] == [
        "on",
        databases.role_name(SourceRole.AUDITOR),
    ]
    assert "read-only transaction" in done.stderr
    assert query(databases, "SELECT count(*) FROM outbox") == [(1,)]
