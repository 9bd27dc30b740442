"""An existing service takes the outbox, `append` and the connector, by the commands and the code of its page.

The service has a database, tables, migrations and a role of its own, which were not made by us.
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
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
import pytest
from confluent_kafka.admin import AdminClient

from outbox.base import project
from outbox.base.settings import Settings
from outbox.base.wait import wait_for
from outbox.dbapi import Event, append
from outbox.kafka.clients import client_config, request_timeout_s
from outbox.stack.postgres import Postgres
from outbox.stack.stack import Stack
from outbox.testing.failures import raises
from tests.support import suite
from tests.support.paths import ROOT
from tests.support.topic_reader import Log, Record

PAGE = (ROOT / "docs" / "existing-service.md").read_text()
BLOCKS = [textwrap.dedent(block) for block in re.findall(r"(?:^ {4}.*\n)+", PAGE, re.MULTILINE)]
PASSWORD = "of-the-shop"
TOPIC = "shop.order"
# As other tools have made it: Alembic for its tables, and one that is called as one of ours.
THEIRS = """
CREATE TABLE orders (id text PRIMARY KEY, cents bigint NOT NULL);
CREATE TABLE alembic_version (version_num text PRIMARY KEY);
INSERT INTO alembic_version VALUES ('shop_0042');
CREATE TABLE idempotency_keys (key text PRIMARY KEY);
"""
TABLES = "SELECT tablename FROM pg_tables WHERE schemaname = 'public' AND tableowner = %s ORDER BY tablename"


class Shop(NamedTuple):
    """The service, the folder of the commands, and the settings that they have."""

    folder: Path
    environment: dict[str, str]
    settings: Settings
    connect: Callable[[], psycopg.Connection[tuple[Any, ...]]]

    def run(self, command: str) -> str:
        """What a command of the page prints; further options may follow the page's words."""
        return self.succeed(["bash", "-c", command])

    def succeed(self, command: list[str]) -> str:
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False, timeout=300
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def block(beginning: str) -> str:
    """The block of the page that begins so."""
    (found,) = [block for block in BLOCKS if block.startswith(beginning)]
    return found


@pytest.fixture(scope="module")
def shop(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    """The service before it has an outbox, with the folder and the settings of the page."""
    folder = tmp_path_factory.mktemp("a shop")
    (folder / "pyproject.toml").write_text(block("[tool.outbox]"))
    events = folder / "connect" / "events" / "order"
    events.mkdir(parents=True)
    shutil.copy(suite.DOMAIN / "connect" / "outbox.json", folder / "connect")
    (events / "aggregate.toml").write_text(block("key = "))
    (events / "placed.v1.schema.json").write_text(block("{"))

    postgres, embedded = Postgres(stack.settings), stack.settings
    postgres.psql(f"CREATE ROLE shop LOGIN PASSWORD '{PASSWORD}'")
    postgres.psql("CREATE DATABASE shop OWNER shop")
    settings = embedded.model_copy(
        update={"source_db_name": "shop", "source_db_role_prefix": "outbox"}
        | {"topic_prefix": "shop", "connector": "shop_outbox"}
    )

    def connect() -> psycopg.Connection[tuple[Any, ...]]:
        return psycopg.connect(
            host=embedded.source_db_host,
            port=embedded.source_db_port,
            dbname="shop",
            user="shop",
            password=PASSWORD,
        )

    with closing(connect()) as connection, connection:
        connection.execute(THEIRS)
    variables = dict(line.split("=", 1) for line in block("OUTBOX_SOURCE_DB_HOST").splitlines())
    path = [str(Path(sys.executable).parent), str(postgres.program("psql").parent), os.environ["PATH"]]
    passwords = {"OWNER": "of-owner", "PRUNER": "of-pruner", "AUDITOR": "of-auditor"}
    # The worker knows one password of Debezium's role.
    passwords["CDC"] = embedded.source_db_cdc_password.get_secret_value()
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("OUTBOX_", "PYTHONPATH"))},
        **variables,
        project.VARIABLE: str(folder),
        **{f"OUTBOX_SOURCE_DB_{role}_PASSWORD": password for role, password in passwords.items()},
        "OUTBOX_SOURCE_DB_HOST": embedded.source_db_host,
        "OUTBOX_SOURCE_DB_PORT": str(embedded.source_db_port),
        "OUTBOX_KAFKA_BOOTSTRAP": embedded.kafka_bootstrap,
        "OUTBOX_CONNECT_URL": embedded.connect_url,
        "PATH": os.pathsep.join(path),
        "PGHOST": embedded.source_db_host,
        "PGPORT": str(embedded.source_db_port),
        "PGUSER": "postgres",
        "PGPASSWORD": embedded.stack_postgres_password.get_secret_value(),
    }
    yield Shop(folder, environment, settings, connect)
    postgres.psql("DROP DATABASE shop WITH (FORCE)")
    for role in ("shop", "outbox_owner", "outbox_app", "outbox_cdc", "outbox_pruner", "outbox_auditor"):
        postgres.psql(f"DROP ROLE {role}")


@pytest.fixture(scope="module")
def migrated(shop: Shop) -> Shop:
    """With the roles and the table of the page."""
    for _ in range(2):  # to be repeated for a change of passwords
        shop.run(block("psql -X -d postgres"))
    shop.run(block("psql -X -d shop"))
    first, second = (shop.run(block("outbox migrate")) for _ in range(2))
    assert "applied source_machinery_0001" in first
    assert "added order.placed.v1" in first
    assert second.count("up to date") == 2
    return shop


@pytest.fixture(scope="module")
def relaying(migrated: Shop) -> Iterator[Shop]:
    """With the connector of the page."""
    migrated.run(block("outbox connect apply"))
    yield migrated
    migrated.run("outbox connect remove --drop-slot --yes")
    admin = AdminClient(client_config(migrated.settings))
    for request in admin.delete_topics([TOPIC, "shop_outbox.offsets", "shop_outbox.markers"]).values():
        request.result(request_timeout_s())


@pytest.fixture
def in_the_service(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets this process be the service: `append` reads the declarations of the shop."""
    monkeypatch.setenv(project.VARIABLE, str(shop.folder))


def placed(order_id: str, cents: int = 700) -> Event:
    """The event of the page."""
    return Event("order", order_id, "placed", {"order_id": order_id, "cents": cents})


def records_of(shop: Shop, key: str) -> list[Record]:
    """The records of a key, once there is one."""
    with closing(Log(shop.settings, [TOPIC])) as log:
        return wait_for(
            f"a record of {key}",
            lambda: [record for record in log.read() if record.key == key],
            timeout_s=60,
            poll_s=0.1,
        )


def test_the_service_keeps_what_it_has(migrated: Shop) -> None:
    with closing(migrated.connect()) as connection:
        theirs = connection.execute(TABLES, ["shop"]).fetchall()
        assert theirs == [("alembic_version",), ("idempotency_keys",), ("orders",)]
        assert connection.execute("SELECT version_num FROM alembic_version").fetchall() == [("shop_0042",)]
        assert connection.execute(TABLES, ["outbox_owner"]).fetchall() == [("outbox",), ("outbox_version",)]
        public = connection.execute("SELECT has_database_privilege('public', 'shop', 'CONNECT')").fetchone()
        assert public == (True,), "others of its clients may still connect"


@pytest.mark.usefixtures("in_the_service")
def test_the_service_may_write_events_and_not_read_them(migrated: Shop) -> None:
    with closing(migrated.connect()) as connection:
        append(connection, placed("1"))
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            connection.execute("SELECT FROM outbox")
        connection.rollback()


@pytest.mark.usefixtures("in_the_service")
@pytest.mark.parametrize(
    ("event", "code"),
    [
        (Event("order", "1", "paid", {"order_id": "1", "cents": 1}), "event-undeclared"),
        (placed("1", cents=-1), "event-invalid"),
        (Event("order", "2", "placed", placed("1").payload), "event-key-mismatch"),
    ],
)
def test_append_refuses_what_the_page_says(migrated: Shop, event: Event, code: str) -> None:
    assert f"`{code}`" in PAGE
    with closing(migrated.connect()) as connection, raises(code):
        append(connection, event)


def test_the_table_refuses_undeclared_events_of_other_clients(migrated: Shop) -> None:
    insert = "INSERT INTO outbox (aggregatetype, aggregateid, type, payload) VALUES ('order', '1', 'paid', '{}')"
    with closing(migrated.connect()) as connection:
        with pytest.raises(psycopg.errors.CheckViolation, match="event_is_declared"):
            connection.execute(insert)
        connection.rollback()


def test_a_wheel_without_its_dependencies_is_enough(migrated: Shop) -> None:
    """The packages that the page installs for the service, beside the driver."""
    named = re.search(r"`pip install (msgspec [^`]*)`", PAGE)
    assert named is not None
    distributions = ["psycopg", "psycopg-binary", "typing_extensions", *named[1].split()]
    packages = migrated.folder / "packages"
    packages.mkdir()
    for distribution in map(metadata.distribution, distributions):
        for top in {file.parts[0] for file in distribution.files or () if ".." not in file.parts}:
            (packages / top).symlink_to(str(distribution.locate_file(top)))
    shutil.copytree(ROOT / "src" / "outbox", packages / "outbox")  # a link would lead to the project of the repository
    program = "from outbox.dbapi import Event; from outbox.writing.rows import rows; import psycopg;"
    checked = "print(rows([Event('order', '1', 'placed', {'order_id': '1', 'cents': 1})])[0]['payload'])"
    path = {"PYTHONPATH": str(packages)}
    found = migrated._replace(environment=path).succeed([sys.executable, "-S", "-c", program + checked])
    assert json.loads(found) == {"order_id": "1", "cents": 1}


@pytest.mark.usefixtures("in_the_service")
def test_change_and_event_are_committed_together_and_relayed(relaying: Shop) -> None:
    with closing(relaying.connect()) as connection:
        append(connection, placed("7", cents=1))
        connection.rollback()
    imports = "import psycopg\nfrom outbox.dbapi import Event, append\norder_id = '7'\n"
    as_shop = {**relaying.environment, "PGPASSWORD": PASSWORD}
    relaying._replace(environment=as_shop).succeed([sys.executable, "-c", imports + block("with psycopg.connect")])

    with closing(relaying.connect()) as connection:
        assert connection.execute("SELECT id, cents FROM orders").fetchall() == [("7", 700)]
    (record,) = records_of(relaying, "7")
    assert json.loads(record.value) == {"order_id": "7", "cents": 700}
    assert (record.headers["eventType"], record.headers["schemaVersion"]) == ("placed", "1")


def test_the_consumer_of_the_page_applies_a_repeated_event_once(migrated: Shop) -> None:
    class Message:
        def headers(self) -> list[tuple[str, bytes]]:
            return [("id", b"one")]

        def value(self) -> bytes:
            return b'{"cents": 700}'

    program: dict[str, Any] = {"json": json}
    exec(block("def handle"), program)  # noqa: S102
    applied: list[Any] = []
    with closing(migrated.connect()) as connection:
        connection.execute("CREATE TEMPORARY TABLE seen (id text PRIMARY KEY)")
        connection.commit()
        for _ in range(2):
            program["handle"](connection, Message(), lambda _, event: applied.append(event))
    assert applied == [{"cents": 700}]


@pytest.mark.usefixtures("in_the_service")
def test_relayed_events_are_pruned_without_a_sink_database(relaying: Shop) -> None:
    with closing(relaying.connect()) as connection, connection:
        append(connection, placed("8"))
    records_of(relaying, "8")
    pruned = json.loads(relaying.run(f"{block('outbox prune').strip()} --keep-hours 0 --json"))
    assert pruned["outbox"]["deleted"] > 0
    assert (pruned["outbox"]["lost"]["count"], pruned["retention"]) == (0, None)
    assert "connector   shop_outbox: RUNNING" in relaying.run("outbox connect status")
