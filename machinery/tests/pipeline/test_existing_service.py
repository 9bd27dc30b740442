"""An existing service takes the outbox, `append` and the connector, by the commands of its page.

The service is the one of examples/existing, which the template's repository has. It has a database, tables, migrations
and a role of its own, which were not made by us.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
import pytest

from outbox.audit.doctor import OF_OUTBOX
from outbox.base import project
from outbox.base.settings import LOGINS, Settings, variable
from outbox.base.wait import wait_for
from outbox.dbapi import Event, append
from outbox_lab.stack.postgres import Postgres
from outbox_lab.stack.stack import Stack
from tests.support.paths import ROOT
from tests.support.topic_reader import Log, Record, delete_topics

EXAMPLE = ROOT.parent / "examples" / "existing"
PAGE = (ROOT / "docs" / "existing-service.md").read_text()
BLOCKS = [textwrap.dedent(block) for block in re.findall(r"(?:^ {4}.*\n)+", PAGE, re.MULTILINE)]
PASSWORD = "of-the-library"
TOPIC = "library.book"
ISBN = "9780132350884"
# As other tools have made it: Alembic, and a table that is called as one of ours.
THEIRS = """
CREATE TABLE alembic_version (version_num text PRIMARY KEY);
INSERT INTO alembic_version VALUES ('library_0042');
CREATE TABLE idempotency_keys (key text PRIMARY KEY);
"""
TABLES = "SELECT tablename FROM pg_tables WHERE schemaname = 'public' AND tableowner = %s ORDER BY tablename"
# The service lends the only copy of a book, to the first of two readers.
LEND = f"""
import django
django.setup()
from django.test import Client
from loans.models import Book
Book.objects.create(isbn="{ISBN}", title="A book", copies=1)
for reader in ("R-1", "R-2"):
    answer = Client().post("/books/{ISBN}/lend", {{"reader": reader}}, content_type="application/json")
    print(answer.status_code)
"""
pytestmark = pytest.mark.skipif(not EXAMPLE.exists(), reason="examples/existing is in the template's repository")


class Library(NamedTuple):
    """The service, its folder, and the environment of the commands."""

    folder: Path
    environment: dict[str, str]
    settings: Settings
    connect: Callable[[], psycopg.Connection[tuple[Any, ...]]]

    def run(self, command: str) -> str:
        """Output of a command of the page; further options may follow the page's words."""
        return self._succeed(["bash", "-c", command])

    def python(self, *words: str) -> str:
        """Output of the service, as its own role."""
        mine = {"PGUSER": "library", "PGPASSWORD": PASSWORD, "DJANGO_SETTINGS_MODULE": "library.settings"}
        return self._succeed([sys.executable, *words], **mine)

    def _succeed(self, command: list[str], **more: str) -> str:
        env = {**self.environment, **more}
        done = subprocess.run(command, cwd=self.folder, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def block(beginning: str) -> str:
    """The block of the page that begins so."""
    (found,) = [block for block in BLOCKS if block.startswith(beginning)]
    return found


@pytest.fixture(scope="module")
def library(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Library]:
    """The service before its database has an outbox, with the settings of the page."""
    folder = shutil.copytree(EXAMPLE, tmp_path_factory.mktemp("a library") / "existing")
    postgres, embedded = Postgres(stack.settings), stack.settings
    postgres.psql(f"CREATE ROLE library LOGIN PASSWORD '{PASSWORD}'")
    postgres.psql("CREATE DATABASE library OWNER library")
    settings = embedded.replace(
        source_db_url=embedded.source_db_url.replace(name="library"),
        source_db_role_prefix="library",
        topic_prefix="library",
        connector="library_outbox",
    )

    def connect() -> psycopg.Connection[tuple[Any, ...]]:
        url = embedded.source_db_url
        return psycopg.connect(host=url.host, port=url.port, dbname="library", user="library", password=PASSWORD)

    with closing(connect()) as connection, connection:
        connection.execute(THEIRS)
    variables = dict(line.split("=", 1) for line in block("OUTBOX_SOURCE_DB_URL").splitlines())
    path = [str(Path(sys.executable).parent), str(postgres.program("psql").parent), os.environ["PATH"]]
    passwords = {"OWNER": "of-owner", "PRUNER": "of-pruner", "AUDITOR": "of-auditor"}
    # The worker knows one password of Debezium's role.
    passwords["CDC"] = embedded.source_db_cdc_password.get_secret_value()
    of_stack = embedded.as_env()
    of_servers = [variable(name) for one in LOGINS.items() for name in (one[0], *one[1])]
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("OUTBOX_", "PYTHONPATH"))},
        **variables,
        **{f"OUTBOX_SOURCE_DB_{role}_PASSWORD": password for role, password in passwords.items()},
        "OUTBOX_SOURCE_DB_URL": str(settings.source_db_url),
        **{name: of_stack[name] for name in of_servers if name in of_stack},
        "PATH": os.pathsep.join(path),
        "PGHOST": embedded.source_db_url.host,
        "PGPORT": str(embedded.source_db_url.port),
        "PGUSER": "postgres",
        "PGPASSWORD": postgres.password,
    }
    made = Library(folder, environment, settings, connect)
    made.python("manage.py", "migrate", "loans", "0001")
    yield made
    postgres.psql("DROP DATABASE library WITH (FORCE)")
    for role in ("library", *(f"library_{one}" for one in ("owner", "app", "cdc", "pruner", "auditor"))):
        postgres.psql(f"DROP ROLE {role}")


@pytest.fixture(scope="module")
def migrated(library: Library) -> Library:
    """With the roles and the table of the page, and the service's next migration."""
    for _ in range(2):  # to be repeated for a change of passwords
        library.run(block("outbox roles --only source"))
    first, second = (library.run(block("outbox migrate")) for _ in range(2))
    assert "applied source_machinery_0001" in first
    assert "added book.lent.v1, book.returned.v1" in first
    assert second.count("up to date") == 2
    library.python("manage.py", "migrate")
    return library


@pytest.fixture(scope="module")
def relaying(migrated: Library) -> Iterator[Library]:
    """With the connector of the page."""
    apply, _ = block("outbox connect apply").splitlines()
    migrated.run(apply)
    yield migrated
    migrated.run("outbox connect remove --drop-slot --yes")
    delete_topics(migrated.settings, TOPIC, "library_outbox.offsets", "library_outbox.markers")


@pytest.fixture
def in_the_service(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets this process be the service: `append` reads the declarations of the library."""
    monkeypatch.setenv(project.VARIABLE, str(library.folder))


def lent(isbn: str = ISBN, reader: str = "R-17") -> Event:
    """The event of the page."""
    payload = {"isbn": isbn, "reader": reader, "occurred_at": "2026-11-21T10:00:00Z"}
    return Event("book", isbn, "lent", payload)


def records_of(library: Library, key: str) -> list[Record]:
    """The records of a key, once there is one."""
    with closing(Log(library.settings, [TOPIC])) as log:
        found = lambda: [record for record in log.read() if record.key == key]  # noqa: E731
        return wait_for(f"a record of {key}", found, timeout_s=60, poll_s=0.1)


@pytest.mark.usefixtures("in_the_service")
def test_the_service_keeps_what_it_has(migrated: Library) -> None:
    with closing(migrated.connect()) as connection:
        theirs = [name for (name,) in connection.execute(TABLES, ["library"]).fetchall()]
        assert theirs == ["alembic_version", "django_migrations", "idempotency_keys", "loans_book"]
        assert connection.execute("SELECT version_num FROM alembic_version").fetchall() == [("library_0042",)]
        assert connection.execute(TABLES, ["library_owner"]).fetchall() == [("outbox",), ("outbox_version",)]
        public = connection.execute("SELECT has_database_privilege('public', 'library', 'CONNECT')").fetchone()
        assert public == (True,), "others of its clients may still connect"
        query = "SELECT has_column_privilege('library_auditor', 'loans_book', %s, 'SELECT')"
        assert [connection.execute(query, [name]).fetchone() for name in ("lent", "title")] == [(True,), (False,)]
        append(connection, lent())
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            connection.execute("SELECT FROM outbox")
        connection.rollback()


def test_change_and_event_are_committed_together_and_relayed(relaying: Library) -> None:
    assert relaying.python("-c", LEND).split() == ["201", "409"]
    with closing(relaying.connect()) as connection:
        assert connection.execute("SELECT isbn, lent FROM loans_book").fetchall() == [(ISBN, 1)]
    (record,) = records_of(relaying, ISBN)
    payload = json.loads(record.value)
    assert (payload["isbn"], payload["reader"]) == (ISBN, "R-1")
    assert (record.headers["eventType"], record.headers["schemaVersion"]) == ("lent", "1")
    looked = relaying.run("outbox doctor --only outbox").splitlines()
    assert [line.split()[:2] for line in looked if "in order" in line] == [["ok", hop] for hop in OF_OUTBOX]


def test_the_consumer_of_the_page_applies_a_repeated_event_once(migrated: Library) -> None:
    class Message:
        def headers(self) -> list[tuple[str, bytes]]:
            return [("id", b"one")]

        def value(self) -> bytes:
            return b'{"isbn": "9780132350884"}'

    program: dict[str, Any] = {"json": json}
    exec(block("def handle"), program)  # noqa: S102
    applied: list[Any] = []
    with closing(migrated.connect()) as connection:
        connection.execute("CREATE TEMPORARY TABLE seen (id text PRIMARY KEY)")
        connection.commit()
        for _ in range(2):
            program["handle"](connection, Message(), lambda _, event: applied.append(event))
    assert applied == [{"isbn": ISBN}]


@pytest.mark.usefixtures("in_the_service")
def test_relayed_events_are_pruned_without_a_sink_database(relaying: Library) -> None:
    other = "9780201633610"
    with closing(relaying.connect()) as connection, connection:
        append(connection, lent(other))
    records_of(relaying, other)
    _, prune = block("outbox connect apply").splitlines()
    pruned = json.loads(relaying.run(f"{prune} --keep-hours 0 --json"))
    assert pruned["outbox"]["deleted"] > 0
    assert (pruned["outbox"]["missing"], pruned["retention"]) == (0, None)
    assert "connector   library_outbox: RUNNING" in relaying.run("outbox connect status")
