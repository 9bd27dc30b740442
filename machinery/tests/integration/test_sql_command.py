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
COUNT = "SELECT count(*) FROM outbox"


def started(settings: Settings, *statement: str) -> subprocess.Popen[str]:
    """`outbox sql source`, as a process."""
    command = [sys.executable, "-m", "outbox", "sql", "source", *statement]
    own, pipe = environment(settings.home, **settings.as_env()), subprocess.PIPE
    return subprocess.Popen(command, env=own, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


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


@pytest.mark.parametrize("statement", ["SET TRANSACTION READ WRITE; DELETE FROM outbox", "SELEC"])
def test_server_refuses_the_auditor_s_changes_in_one_line(databases: Settings, statement: str) -> None:
    query(databases, EVENT)
    done = outbox("sql", "source", statement, home=databases.home, **databases.as_env())
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert query(databases, COUNT) == [(1,)]


def test_owner_s_changes_are_committed(databases: Settings) -> None:
    query(databases, EVENT)
    assert run(databases, "sql", "source", "--role", "owner", "DELETE FROM outbox").strip() == "DELETE 1"
    assert query(databases, COUNT) == [(0,)]


def test_ctrl_c_cancels_the_statement(databases: Settings) -> None:
    running = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE '%pg_sleep(7777)' AND state = 'active'"

    def count() -> int:
        return int(query(databases, f"{running} AND datname = current_database()", SourceRole.AUDITOR)[0][0])

    with started(databases, "SELECT pg_sleep(7777)") as process:
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
    with started(databases) as process:
        statements = "SHOW default_transaction_read_only; SELECT current_user;\nDELETE FROM outbox;"
        shown, said = process.communicate(statements, timeout=60)
    auditor = databases.role_name(SourceRole.AUDITOR)
    assert [word for word in shown.split() if word in ("on", auditor)] == ["on", auditor]
    assert "read-only transaction" in said
    assert query(databases, COUNT) == [(1,)]
