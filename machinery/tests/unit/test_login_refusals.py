"""Why a login failed: for good, or for now. A sink starts again after the second kind.

And what a server gets that only pretends to be ours.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import asyncpg
import pytest
from sqlalchemy.exc import OperationalError

from outbox.base import database
from outbox.base.errors import Failure
from outbox.base.settings import Settings, SinkRole, SourceRole, load
from outbox.http.async_database import make_async_engine
from outbox.http.database import make_engine
from outbox_lab.stack.internals import Internals
from outbox_lab.stack.postgres import Postgres
from tests.support.fake_postgres import CLEAR_TEXT, MD5, NO_PASSWORD, SCRAM, listening

SERVER = 'connection to server at "127.0.0.1", port 15041 failed: FATAL:  '


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ("could not write init file: No space left on device", "database-unavailable"),
        ("the database system is in recovery mode", "database-unavailable"),
        ('password authentication failed for user "x"', "database-login-refused"),
        ('role "x" does not exist', "database-login-refused"),
    ],
)
def test_a_login_that_fails_for_now_is_not_refused_for_good(tmp_path: Path, said: str, code: str) -> None:
    settings = load(tmp_path, environment=False)
    assert database.refusal_of(settings, SinkRole.WRITER, [SERVER + said])[2] == code


PASSWORD = "a-secret"


def to(port: int, home: Path) -> Settings:
    Internals().write(home)
    names = ("source_db_app_password", "sink_db_writer_password")
    url = f"postgresql://127.0.0.1:{port}"
    return load(home, environment=False, source_db_url=url, sink_db_url=url, **dict.fromkeys(names, PASSWORD))


@pytest.mark.parametrize("question", [CLEAR_TEXT, NO_PASSWORD])
def test_a_process_that_takes_the_port_gets_no_password(question: bytes, tmp_path: Path) -> None:
    with listening(question) as fake:
        settings = to(fake.port, tmp_path)
        with pytest.raises(Failure) as refused:
            database.connect(settings, SinkRole.WRITER).close()
        with pytest.raises(OperationalError), make_engine(settings).connect():
            pass
        assert not Postgres(settings).is_ready()
    assert (fake.logins, fake.answers) == (3, [])
    assert refused.value.code == "database-login-refused"
    assert "sslmode=verify-full in OUTBOX_SINK_DB_URL" in str(refused.value)


@pytest.mark.parametrize("questions", [[CLEAR_TEXT], [MD5], [SCRAM, CLEAR_TEXT], [SCRAM, NO_PASSWORD]])
def test_a_process_that_takes_the_port_gets_no_password_of_an_asyncio_service(
    questions: list[bytes], tmp_path: Path
) -> None:
    async def connect(settings: Settings) -> None:
        engine = make_async_engine(settings)
        with pytest.raises(OperationalError, match="SCRAM"):
            async with engine.connect():
                pass
        await engine.dispose()

    with listening(*questions) as fake:
        settings = to(fake.port, tmp_path)
        asyncio.run(connect(settings))
    assert (fake.logins, len(fake.answers)) == (1, questions.count(SCRAM)), "the begin of SCRAM says no password"
    assert not fake.has_got(settings.role_name(SourceRole.APP), PASSWORD)


def test_asyncpg_connections_of_others_are_left_alone() -> None:
    async def connect(port: int) -> None:
        with pytest.raises((asyncpg.PostgresError, OSError)):
            await asyncpg.connect(
                host="127.0.0.1", port=port, user="x", password=PASSWORD, database="x", timeout=3, ssl=False
            )

    with listening(CLEAR_TEXT) as fake:
        asyncio.run(connect(fake.port))
    assert fake.has_got("x", PASSWORD)
