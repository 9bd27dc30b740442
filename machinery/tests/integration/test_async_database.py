"""The asyncio service's connections: the same sessions as the other service's, passwords of a command, and TLS."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy.exc import DBAPIError, OperationalError

from outbox.base.settings import SYSTEM_ROOTS, Settings, SourceRole
from outbox.http.async_database import make_async_engine
from outbox.http.database import TIMEOUTS, is_unavailable, make_engine
from outbox_lab.testing.homes import Homes
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


def test_its_sessions_are_those_of_the_other_service(databases: Settings) -> None:
    engine = make_engine(databases)
    with engine.connect() as connection:
        expected = connection.exec_driver_sql(SESSION).scalar_one()
    engine.dispose()
    assert all(name in expected for name in (*TIMEOUTS, "application_name", "DateStyle", "TimeZone"))
    assert answer(databases, SESSION) == expected


def test_a_command_prints_the_password_at_each_connection(databases: Settings, tmp_path: Path) -> None:
    token = tmp_path / "token"
    settings = databases.replace(db_password_command=f"cat '{token}'")
    token.write_text(databases.source_db_app_password.get_secret_value())
    assert answer(settings) == databases.role_name(SourceRole.APP)
    token.write_text("another")
    with pytest.raises(OperationalError, match="password"):
        answer(settings)
    token.unlink()
    with pytest.raises(OperationalError, match="prints no password"):
        answer(settings)


@pytest.mark.parametrize(
    ("statement", "is_for_now"),
    [
        ("SELECT pg_terminate_backend(pg_backend_pid())", True),
        ("DO $$ BEGIN RAISE SQLSTATE '57014'; END $$", True),  # statement_timeout
        ("DO $$ BEGIN RAISE SQLSTATE '40001'; END $$", True),
        ("DO $$ BEGIN RAISE SQLSTATE '25006'; END $$", True),
        ("SELECT 1/0", False),
        ("SELECT nothing", False),
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
