"""Connections to the databases: what a session sets, passwords of a command, TLS, the asyncio service's, and those of
`outbox sql`.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy.exc import DBAPIError, OperationalError

from outbox.base.database import connect
from outbox.base.settings import SYSTEM_ROOTS, Settings, SinkRole, SourceRole
from outbox.http.async_database import make_async_engine
from outbox.http.database import TIMEOUTS, is_unavailable, make_engine
from outbox.migrations.migrate import migrate
from outbox_lab.stack.postgres import Postgres
from outbox_lab.testing.command import environment, outbox, run
from outbox_lab.testing.failures import raises
from outbox_lab.testing.helpers import query
from outbox_lab.testing.homes import Homes
from tests.support.paths import ROOT
from tests.support.secured import Secured, secured_postgres

SESSION = """
    SELECT string_agg(name || '=' || setting, ' ' ORDER BY name) FROM pg_settings
     WHERE source = 'client' OR name IN ('transaction_isolation', 'transaction_timeout')
"""


def answer(settings: Settings, statement: str = "SELECT current_user") -> str:
    """The database's answer to a query on a new connection."""

    async def ask() -> str:
        engine = make_async_engine(settings)
        try:
            async with engine.connect() as connection:
                return str((await connection.exec_driver_sql(statement)).scalar_one())
        finally:
            await engine.dispose()

    return asyncio.run(ask())


# Sessions ----------------------------------------------------------------------------------------------------------

# What databases may set otherwise, and what a session sets.
SET = {
    "client_encoding": ("'LATIN1'", "UTF8"),
    "DateStyle": ("'SQL, DMY'", "ISO, MDY"),
    "IntervalStyle": ("'iso_8601'", "postgres"),
    "TimeZone": ("'Pacific/Auckland'", "UTC"),
    "default_transaction_isolation": ("'serializable'", "read committed"),
    "quote_all_identifiers": ("on", "off"),
    "search_path": ("app, public", "public"),
    "standard_conforming_strings": ("off", "on"),
}


def test_a_session_sets_what_it_relies_on(databases: Settings, postgres: Postgres) -> None:
    for name in (databases.source_db_url.name, databases.sink_db_url.name):
        postgres.psql("; ".join(f"ALTER DATABASE {name} SET {key} = {value}" for key, (value, _) in SET.items()))
    for role in (*SourceRole, *SinkRole):
        with closing(connect(databases, role)) as connection, connection.cursor() as cursor:
            for name, (_, expected) in SET.items():
                cursor.execute(f"SHOW {name}")
                assert cursor.fetchall() == [(expected,)], (role, name)
            cursor.execute("SELECT timestamptz '9999-12-31T23:59:59Z', 'ä'")  # in Auckland it is the year 10000
            [(last, letter)] = cursor.fetchall()
            assert (last.isoformat(), letter) == ("9999-12-31T23:59:59+00:00", "ä")
    assert migrate(databases) == ({"source": [], "sink": []}, ([], [], []), []), "it knows its guard"


def test_its_sessions_are_those_of_the_other_service(databases: Settings) -> None:
    engine = make_engine(databases)
    with engine.connect() as connection:
        expected = connection.exec_driver_sql(SESSION).scalar_one()
    engine.dispose()
    assert all(name in expected for name in (*TIMEOUTS, "application_name", "DateStyle", "TimeZone"))
    assert answer(databases, SESSION) == expected


# Passwords -----------------------------------------------------------------------------------------------------------


def test_a_command_prints_the_password_at_each_connection(databases: Settings, tmp_path: Path) -> None:
    token = tmp_path / "token"
    settings = databases.replace(db_password_command=f"cat '{token}'")
    token.write_text(databases.source_db_app_password.get_secret_value())
    connect(settings, SourceRole.APP).close()
    with make_engine(settings).connect() as connection:
        assert connection.exec_driver_sql("SELECT current_user").scalar() == settings.role_name(SourceRole.APP)
    assert answer(settings) == databases.role_name(SourceRole.APP)
    token.write_text("another")
    with raises("database-login-refused", "password"):
        connect(settings, SourceRole.APP)
    with pytest.raises(OperationalError, match="password"):
        make_engine(settings).connect()
    with pytest.raises(OperationalError, match="password"):
        answer(settings)


@pytest.mark.parametrize("command", ["sh -c 'echo no token here >&2; exit 3'", "/missing", "sh 'open"])
def test_a_command_that_prints_no_password_is_named(databases: Settings, command: str) -> None:
    settings = databases.replace(db_password_command=command)
    with raises("password-command-failed", "OUTBOX_DB_PASSWORD_COMMAND"):
        connect(settings, SinkRole.WRITER)
    with pytest.raises(OperationalError, match="prints no password"):
        make_engine(settings).connect()
    with pytest.raises(OperationalError, match="prints no password"):
        answer(settings)


@pytest.mark.parametrize(
    ("statement", "is_for_now"),
    [
        ("SELECT pg_terminate_backend(pg_backend_pid())", True),
        ("DO $$ BEGIN RAISE SQLSTATE '57014'; END $$", True),  # statement_timeout
        ("SELECT 1/0", False),
    ],
)
def test_an_error_says_whether_the_database_is_unavailable_for_now(
    databases: Settings, statement: str, is_for_now: bool
) -> None:
    with pytest.raises(DBAPIError) as failed:
        answer(databases, statement)
    assert is_unavailable(failed.value) is is_for_now


@pytest.fixture(scope="module")
def secured(homes: Homes) -> Iterator[Secured]:
    with secured_postgres(homes.new("tls")) as secured:
        yield secured


@pytest.mark.parametrize(
    ("parts", "refusal"),
    [
        ({"sslmode": "require"}, None),
        ({"sslmode": "verify-full"}, None),
        ({"sslrootcert": "other"}, "(?i)certificate"),
        ({"sslrootcert": SYSTEM_ROOTS}, "(?i)certificate"),
        ({"sslmode": "disable"}, "no encryption"),
    ],
)
def test_tls_is_as_the_settings_say(secured: Secured, parts: dict[str, object], refusal: str | None) -> None:
    parts = {name: secured.certificates.other if value == "other" else value for name, value in parts.items()}
    settings = secured.settings.replace(source_db_url=secured.settings.source_db_url.replace(**parts))
    if refusal is None:
        assert answer(settings, "SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()") == "True"
    else:
        with pytest.raises(OperationalError, match=refusal):
            answer(settings)


# `outbox sql` ---------------------------------------------------------------------------------------------------------

EVENT = "INSERT INTO outbox (aggregatetype, aggregateid, type, payload) VALUES ('item', 'a', 'received', '{}')"
COUNT = "SELECT count(*) FROM outbox"


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


def test_without_a_statement_psql_opens_as_the_read_only_auditor(databases: Settings) -> None:
    query(databases, EVENT)
    done = subprocess.run(
        [sys.executable, "-m", "outbox", "sql", "source"],
        env=environment(databases.home, **databases.as_env()),
        input="SHOW default_transaction_read_only; SELECT current_user;\nDELETE FROM outbox;",
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    auditor = databases.role_name(SourceRole.AUDITOR)
    assert [word for word in done.stdout.split() if word in ("on", auditor)] == ["on", auditor]
    assert "read-only transaction" in done.stderr
    assert query(databases, COUNT) == [(1,)]
