"""`outbox roles` as the administrator of a managed server, who is no superuser, and as printed SQL."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from psycopg2 import extensions
from sqlalchemy.exc import OperationalError

from outbox.audit.doctor import examine
from outbox.base.database import connect
from outbox.base.settings import Secret, Settings, SinkRole, SourceRole, password_setting
from outbox.http.database import make_engine
from outbox.migrations import migrate, roles
from outbox.migrations.roles import Administrator
from outbox_lab.stack.postgres import Postgres
from outbox_lab.testing.command import run
from outbox_lab.testing.failures import raises
from outbox_lab.testing.helpers import query

REPLICATES_SINCE = 160_000  # somebody who is no superuser may give the right to replicate


@pytest.fixture
def managed(template: Settings, superuser: extensions.cursor) -> Iterator[tuple[Settings, Administrator]]:
    """Settings of databases and roles that do not exist yet, and an administrator."""
    suffix = uuid.uuid4().hex[:8]
    settings = template.replace(
        source_db_url=template.source_db_url.replace(name=f"source_{suffix}"),
        sink_db_url=template.sink_db_url.replace(name=f"sink_{suffix}"),
        source_db_role_prefix=f"source_{suffix}",
        sink_db_role_prefix=f"sink_{suffix}",
    )
    admin = Administrator(f"admin_{suffix}", "of-the-admin")
    superuser.execute(f"CREATE ROLE {admin.user} LOGIN CREATEROLE CREATEDB REPLICATION PASSWORD '{admin.password}'")
    yield settings, admin
    for name in (settings.source_db_url.name, settings.sink_db_url.name):
        superuser.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")
    for role in (*SourceRole, *SinkRole):
        superuser.execute(f"DROP ROLE IF EXISTS {settings.role_name(role)}")
    superuser.execute(f"DROP OWNED BY {admin.user}; DROP ROLE {admin.user}")


@pytest.fixture(params=["attribute", "as on RDS"])
def replication(
    request: pytest.FixtureRequest, managed: tuple[Settings, Administrator], superuser: extensions.cursor
) -> Iterator[str]:
    """How the administrator gives the right to replicate."""
    superuser.execute("SELECT current_setting('server_version_num')::int")
    if request.param == "attribute":
        if superuser.fetchall()[0][0] < REPLICATES_SINCE:
            pytest.skip("only a superuser may on this server")
        yield "SELECT rolreplication FROM pg_roles WHERE rolname = %s"
        return
    superuser.execute(f"CREATE ROLE {roles.RDS_REPLICATION}")
    superuser.execute(f"GRANT {roles.RDS_REPLICATION} TO {managed[1].user} WITH ADMIN OPTION")
    yield f"SELECT pg_has_role(%s, '{roles.RDS_REPLICATION}', 'MEMBER')"
    superuser.execute(f"DROP ROLE {roles.RDS_REPLICATION}")


def test_an_administrator_who_is_no_superuser_makes_everything(
    managed: tuple[Settings, Administrator], replication: str
) -> None:
    settings, admin = managed
    for database in (*roles.DATABASES, *roles.DATABASES):  # a second run, too
        roles.make(settings, database, admin)
    assert [*migrate.migrate(settings).applied] == [*roles.DATABASES]
    for role in (*SourceRole, *SinkRole):
        connect(settings, role).close()
    assert [one for one in examine(settings, "source-db", "sink-db") if not one.is_ok] == []
    assert query(settings, replication, SourceRole.OWNER, [settings.role_name(SourceRole.CDC)]) == [(True,)]


def test_passwords_are_rotated(managed: tuple[Settings, Administrator]) -> None:
    settings, admin = managed
    roles.make(settings, "sink", admin)
    changed = settings.replace(sink_db_writer_password=Secret("another one"))
    with raises("database-login-refused"):
        connect(changed, SinkRole.WRITER)
    roles.make(changed, "sink", admin)
    connect(changed, SinkRole.WRITER).close()
    with raises("database-login-refused"):
        connect(settings, SinkRole.WRITER)


@pytest.mark.parametrize("password", ["", "pässword"])
def test_a_password_that_no_server_would_keep_as_we_do_is_refused(template: Settings, password: str) -> None:
    wrong = template.replace(sink_db_owner_password=Secret(password))
    with raises("password-unfit"):
        list(roles.statements(wrong, "sink"))


def test_an_administrator_without_the_right_is_told(
    managed: tuple[Settings, Administrator], superuser: extensions.cursor
) -> None:
    settings, admin = managed
    superuser.execute(f"ALTER ROLE {admin.user} NOCREATEROLE")
    with raises("roles-refused", "permission denied to create role"):
        roles.make(settings, "source", admin)
    with raises("roles-refused"):
        roles.make(settings, "source", Administrator(admin.user, "wrong"))


def test_printed_sql_makes_the_same(
    managed: tuple[Settings, Administrator], postgres: Postgres, tmp_path: Path
) -> None:
    settings, _ = managed
    printed = run(settings, "roles", "--print")
    passwords = {value for name, value in settings.as_env().items() if name.endswith("_PASSWORD") and value}
    assert not [password for password in passwords if password in printed]
    file = tmp_path / "roles.sql"
    file.write_text(printed)
    postgres.run_psql(["-d", "postgres", "-f", str(file)])
    migrate.migrate(settings)
    for role in (*SourceRole, *SinkRole):
        connect(settings, role).close()


@pytest.fixture
def token(managed: tuple[Settings, Administrator], tmp_path: Path) -> Path:
    """A file with the one password of all roles of a sink database, which a command prints."""
    file = tmp_path / "token"
    file.write_text("first")
    return file


def with_token(settings: Settings, file: Path) -> Settings:
    """Settings without passwords of the sink's roles, whose command prints the file."""
    return settings.replace(db_password_command=f"cat '{file}'")


def rotate(settings: Settings, admin: Administrator, token: Path, password: str) -> None:
    """Let the server take another password of all roles only."""
    changed = {password_setting(role): Secret(password) for role in (*SourceRole, *SinkRole)}
    made = settings.replace(**changed)
    for database in roles.DATABASES:
        roles.make(made, database, admin)
    token.write_text(password)


def test_a_command_prints_the_password_at_each_connection(
    managed: tuple[Settings, Administrator], token: Path, replication: str
) -> None:
    settings, admin = managed
    settings = with_token(settings, token)
    rotate(settings, admin, token, "first")
    engine = make_engine(settings)
    for password in ("second", "third"):
        rotate(settings, admin, token, password)
        connect(settings, SinkRole.WRITER).close()
        with engine.connect() as connection:
            assert connection.exec_driver_sql("SELECT current_user").scalar() == settings.role_name(SourceRole.APP)
        engine.dispose()
    assert replication


def test_a_command_that_prints_no_password_is_told(template: Settings, tmp_path: Path) -> None:
    for command in ("false", str(tmp_path / "missing"), "sh -c 'echo no token here >&2; exit 3'", "sh 'open", ""):
        settings = template.replace(db_password_command=command)
        with raises("password-command-failed", "OUTBOX_DB_PASSWORD_COMMAND"):
            connect(settings, SinkRole.WRITER)
        with pytest.raises(OperationalError, match="prints no password"):
            make_engine(settings).connect()
