"""Recoveries of the source: an older backup is restored, and a replica takes over."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from psycopg2 import extensions

from outbox.base import project
from outbox.base.settings import Settings, SourceRole
from outbox.base.wait import wait_for
from outbox.migrations.migrate import migrate
from outbox.relay import lifecycle, slot
from outbox_lab.soak.proxy import Proxy
from outbox_lab.stack import internals, ports
from outbox_lab.stack.postgres import HBA_FILE, UNPRIVILEGED, Postgres, unprivileged
from outbox_lab.stack.process import Process
from outbox_lab.testing.fixtures.stack import chosen_postgres
from outbox_lab.testing.homes import Homes
from tests.support import suite
from tests.support.outbox_rows import ids
from tests.support.rehearsal import Rehearsal, Rehearse, client_of
from tests.support.servers import Server, address_of, put_back, run_client, snapshot
from tests.support.topic_reader import duplicates, read, relayed


def test_source_that_was_restored_from_an_older_backup(
    rehearsal: Rehearse, postgres: Postgres, superuser: extensions.cursor
) -> None:
    one = rehearsal("The source was restored from an older backup")
    name = one.settings.source_db_url.name
    one.working(1, 2)
    backup = run_client(postgres, one.settings, "pg_dump", name)
    backup = backup.replace("SET transaction_timeout = 0;\n", "")  # of a newer pg_dump than the server
    one.working(4, 5)
    lost = set(ids(one.settings)[-2:])
    one.run("connect", "remove")
    superuser.execute(f"DROP DATABASE {name} WITH (FORCE)")
    superuser.execute(f"CREATE DATABASE {name} OWNER {one.settings.role_name(SourceRole.OWNER)}")
    run_client(postgres, one.settings, "psql", "-qX", "-v", "ON_ERROR_STOP=1", "-d", name, given=backup)
    assert len(ids(one.settings)) == 2
    assert not lost & set(ids(one.settings))
    one.diagnosed()
    one.follow()
    assert {(found.code, found.count) for found in one.checked().findings} == {("foreign-events", 2)}
    one.working(7)  # its key gets a version again that a lost event had
    assert {(found.code, found.count) for found in one.checked().findings} == {("foreign-events", 2)}


@pytest.mark.parametrize(
    "is_running",
    [
        pytest.param(True, id="connector-running"),
        pytest.param(False, id="connector-removed", marks=pytest.mark.recovery),
    ],
)
def test_disk_of_the_source_that_was_put_back(topic: Settings, homes: Homes, is_running: bool) -> None:
    """With a running connector the log still ends before its offset; with a removed one it has grown beyond it."""
    server = Server(topic, homes, chosen_postgres())
    with server.running(), address_of(topic, server) as address:
        settings = topic.replace(source_db_url=topic.source_db_url.replace(port=address.port))
        migrate(settings)
        lifecycle.apply(settings)
        one = Rehearsal(settings, client_of(settings), "The disk of the source was put back to a snapshot")
        one.working(1, 2)
        copy = snapshot(server)
        server.psql("SELECT pg_switch_wal()")  # what it writes by itself must not reach the offset
        one.working(4, 5)
        lost, moment = set(ids(settings)[-2:]), time.time()
        if not is_running:
            lifecycle.remove(settings)
        put_back(server, copy)
        assert not lost & set(ids(settings))
        one.move(7)  # is passed over, or would be
        passed_over = ids(settings)[-1]
        if not is_running:
            wait_for("time to pass", lambda: time.time() > moment + 2 * slot.CLOCK_STEP_US / 1e6, timeout_s=30)
            one.move(7)
            server.psql("SELECT pg_switch_wal()")
            server.psql("SELECT pg_switch_wal()")
        one.diagnosed(*one.entry.codes[:1] if is_running else one.entry.codes[1:])
        assert "restored to an earlier state" in one.run("connect", "apply", status=1).stderr
        assert passed_over not in {record.id for record in read(settings)}
        one.follow()
        assert passed_over in {record.id for record in relayed(settings)}
        assert {(found.code, found.count) for found in one.checked().findings} == {("foreign-events", 2)}
        one.working(8)
        assert {(found.code, found.count) for found in one.checked().findings} == {("foreign-events", 2)}
        lifecycle.remove(settings, drop_slot=True)


STANDBY = "standby"  # the slot by which the replica reads the primary's log
FAILOVER_SINCE = 17  # the version of Postgres


class Primary(Postgres):
    """A server that a replica may follow, and whose logical slots never run ahead of it."""

    def options(self) -> Mapping[str, str | int | Path]:
        hba = self.folder / "pg_hba.conf"
        hba.write_text(f"{HBA_FILE.read_text()}host replication postgres all scram-sha-256\n")
        return {**super().options(), "hba_file": hba, "synchronized_standby_slots": STANDBY}


class Replica(Postgres):
    """A streaming replica, which also copies the slots that may fail over."""

    def __init__(self, settings: Settings, primary: Postgres) -> None:
        super().__init__(settings)
        self._primary = primary

    def options(self) -> Mapping[str, str | int | Path]:
        return {**super().options(), "sync_replication_slots": "on", "hot_standby_feedback": "on"}

    def wait_ready(self) -> None:
        Process.wait_ready(self)  # not the roles: they come from the primary

    def _init(self) -> None:
        login = f"user=postgres password={self._primary.password}"
        primary = f"host={ports.LOOPBACK} port={self._primary.port} {login} dbname=postgres"
        if os.geteuid() == 0:
            os.chown(self.folder, UNPRIVILEGED, UNPRIVILEGED)
        words: list[str | Path] = ["-d", primary, "-D", self.data, "-R", "-C", "-S", STANDBY, "-c", "fast"]
        done = self._run(unprivileged([self.program("pg_basebackup"), *words]))
        assert done.returncode == 0, done.stderr

    def has_slot(self, name: str) -> bool:
        """Whether the slot would survive a failover now."""
        ready = f"SELECT FROM pg_replication_slots WHERE slot_name = '{name}' AND synced AND NOT temporary"
        return self.psql(f"SELECT count(*) FROM ({ready}) AS ready").stdout == "1\n"


@pytest.fixture
def failover_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The fixture domain, with a connector whose slot may fail over."""
    domain = suite.copied_to(tmp_path / "project")
    file = domain / "connect" / "outbox.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "slot.failover": "true"}))
    monkeypatch.setenv(project.VARIABLE, str(domain))
    return domain


@pytest.fixture
def servers(topic: Settings, homes: Homes) -> Iterator[tuple[Postgres, Replica]]:
    """A primary with a migrated source, and its replica."""
    if chosen_postgres() < FAILOVER_SINCE:
        pytest.skip("this server does not copy slots to a replica")
    first, second = ports.choose(0, 0)
    of_primary, of_replica = homes.new("primary"), homes.new("replica")
    for home in (of_primary, of_replica):
        internals.read(topic.home).write(home)
    primary = Primary(topic.replace(home=of_primary, source_db_url=topic.source_db_url.replace(port=first)))
    replica = Replica(topic.replace(home=of_replica, source_db_url=topic.source_db_url.replace(port=second)), primary)
    try:
        primary.start()
        migrate(topic.replace(source_db_url=topic.source_db_url.replace(port=first)))
        replica.start()
        yield primary, replica
    finally:
        replica.kill()
        primary.kill()


@pytest.fixture
def address(topic: Settings, servers: tuple[Postgres, Replica]) -> Iterator[Proxy]:
    """The address of the source, which leads to the primary first."""
    with address_of(topic, servers[0]) as proxy:
        yield proxy


@pytest.mark.recovery
@pytest.mark.usefixtures("failover_project")
def test_source_that_failed_over_to_a_replica(
    topic: Settings, servers: tuple[Postgres, Replica], address: Proxy
) -> None:
    primary, replica = servers
    settings = topic.replace(source_db_url=topic.source_db_url.replace(port=address.port))
    one = Rehearsal(settings, client_of(settings), "The source failed over to a replica")
    lifecycle.apply(settings)
    try:
        one.working(1, 2)

        def is_synchronised() -> bool:
            # A copied slot is temporary until the slot of the primary has moved beyond the state in which the replica
            # began to copy it. Only events move it, and what the primary logs of its transactions every 15 s.
            primary.psql("CHECKPOINT")  # logs the running transactions, on every version
            one.move(3)
            return replica.has_slot(settings.connector)

        wait_for("the replica to have the slot", is_synchronised, timeout_s=120, poll_s=0.5)
        one.move(4, 5)
        relayed(settings)
        primary.kill()
        replica.psql("SELECT pg_promote()")
        address.target_port = replica.port
        wait_for("the replica to be the primary", lambda: slot.read(settings) is not None, timeout_s=60)
        one.diagnosed()
        one.follow()
        one.sound()
        assert duplicates(read(settings)) == 0
    finally:
        lifecycle.remove(settings, drop_slot=True)
