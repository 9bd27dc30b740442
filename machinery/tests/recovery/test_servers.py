"""Servers that are replaced or lose their data: Postgres gets a newer major version, fails over to a replica, or is put
back to an older state of its disk; Kafka loses Connect's topics, or all.

The log of another Postgres has other positions than the offset that Connect has stored, or no slot.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from outbox.base import project
from outbox.base.settings import Settings, SinkRole, SourceRole, password_setting
from outbox.base.wait import wait_for
from outbox.kafka import topics
from outbox.migrations.migrate import MINIMUM, migrate
from outbox.relay import lifecycle, slot
from outbox_lab.soak.proxy import Proxy
from outbox_lab.stack import internals, ports
from outbox_lab.stack.postgres import HBA_FILE, MAJOR, UNPRIVILEGED, Postgres, unprivileged
from outbox_lab.stack.process import Process
from outbox_lab.stack.stack import Stack
from outbox_lab.testing.command import run
from outbox_lab.testing.fixtures.stack import chosen_postgres, private_stack
from outbox_lab.testing.helpers import query
from outbox_lab.testing.homes import Homes
from tests.stock import Client
from tests.support import servers, slots, suite
from tests.support.made_events import nth_key
from tests.support.outbox_rows import ids
from tests.support.rehearsal import SINK, Rehearsal, Rehearse, client_of, failure_codes
from tests.support.servers import Server, put_back, snapshot
from tests.support.sink_driver import Database
from tests.support.sink_process import catch_up
from tests.support.topic_reader import delete_topics, duplicates, read, relayed, topic_of

SOURCE, SINKS = "The service's Postgres gets a newer major version", "The sinks' Postgres gets a newer major version"
BEFORE, AFTER = slice(2), slice(2, None)  # the commands of the entry: on the old server, and on the new one


@dataclass
class Chain:
    """A chain whose server is to be replaced, by another one behind the same address."""

    topic: Settings
    old: Server
    new: Server
    one: Rehearsal
    address: Proxy

    def switch(self) -> None:
        """Stop the old server, start the new one unless it runs, and let the address lead there."""
        self.old.stop()
        self.new.start()
        self.address.target_port = self.new.port


@contextmanager
def upgraded(topic: Settings, homes: Homes, version: int, *, sinks: bool = False) -> Iterator[Chain]:
    """A chain on a server of an older version that has relayed and applied two events."""
    old, new = Server(topic, homes, version, sinks=sinks), Server(topic, homes, sinks=sinks)
    try:
        old.start()
        migrate(old.settings)
        with servers.address_of(topic, old) as address:
            settings = servers.moved(topic, address.port, sinks=sinks)
            lifecycle.apply(settings)
            one = Rehearsal(settings, client_of(settings), SOURCE)
            one.working(1, 2)
            yield Chain(topic, old, new, one, address)
            lifecycle.remove(settings, drop_slot=True)
    finally:
        old.kill()
        new.kill()


def finished(chain: Chain, moved: int) -> None:
    """The entry's commands on the new server; then the chain is sound and has relayed each event once."""
    one = chain.one
    one.diagnosed()
    one.follow(AFTER)
    one.sound(7, 8)
    assert duplicates(read(one.settings)) == 0
    assert Database(one.settings).applied() == moved + 2


def test_dump_and_restore(topic: Settings, homes: Homes) -> None:
    """Of both databases, from the oldest version."""
    with upgraded(topic, homes, 15, sinks=True) as chain:
        one = chain.one
        one.move(3, 4)
        relayed(one.settings)  # and not applied
        one.follow(BEFORE)
        assert ids(one.settings) == [], "so the snapshot on the new server sends nothing twice"
        chain.new.start()
        servers.dump(chain.old, chain.new)
        chain.switch()
        sinks = Rehearsal(one.settings, one.client, SINKS)
        sinks.follow()
        assert Database(one.settings).applied() == 4
        finished(chain, 4)


@pytest.mark.recovery
@pytest.mark.parametrize("version", [17, 18])
def test_pg_upgrade_that_keeps_the_slot(topic: Settings, homes: Homes, version: int) -> None:
    """`pg_upgrade` wants it read to its end. It begins after the stored offset then, which `connect apply` refuses."""
    with upgraded(topic, homes, version) as chain:
        one = chain.one
        one.move(3, 4)
        relayed(one.settings)
        lifecycle.remove(one.settings)
        slots.wait_released(one.settings)
        chain.old.stop()
        done = servers.pg_upgrade(chain.old, chain.new)
        assert done.returncode == 1
        assert "logical replication slots that cannot be upgraded" in done.stdout
        chain.old.start()
        slots.advance(one.settings)
        chain.old.stop()
        done = servers.pg_upgrade(chain.old, chain.new)
        assert done.returncode == 0, done.stdout
        chain.switch()
        assert slots.existing(one.settings).active_pid is None
        assert "no event is missing" in one.run("connect", "apply", status=1).stderr
        one.run("connect", "remove", "--drop-slot")
        one.run("connect", "apply")
        one.sound(7, 8)
        assert duplicates(read(one.settings)) == 4, "the outbox was not pruned before"
        assert Database(one.settings).applied() == 4 + 2, "nothing was applied twice"


@pytest.mark.recovery
def test_switch_to_a_server_that_follows(topic: Settings, homes: Homes) -> None:
    """Logical replication copies the tables while the service goes on. Slots and positions of the log stay behind."""
    with upgraded(topic, homes, 15) as chain:
        one = chain.one
        chain.new.start()
        servers.follow(chain.old, chain.new)
        one.move(3, 4)
        relayed(one.settings)
        one.follow(BEFORE)
        servers.leave(chain.old, chain.new)
        chain.switch()
        finished(chain, 4)


# Source and sink on servers of different versions -----------------------------------------------------------------


STRATEGIES = ["dedup", "versions", "merge"]
VERSION = "SELECT current_setting('server_version_num')::int / 10000"


@pytest.fixture
def mixed(chain: Settings, homes: Homes) -> Iterator[Settings]:
    """The chain, with the sink database on a server of another version."""
    another = private_stack(homes.new("other"), MAJOR if chosen_postgres() == MINIMUM else MINIMUM)
    another.up(only=["postgres"])
    migrate(another.settings)
    names = ["sink_db_url", *map(password_setting, SinkRole)]
    yield chain.replace(**{name: getattr(another.settings, name) for name in names})
    another.down(gently=False)


def test_source_and_sink_are_on_servers_of_different_versions(mixed: Settings, client: Client) -> None:
    assert query(mixed, VERSION, SourceRole.AUDITOR) != query(mixed, VERSION, SinkRole.AUDITOR)
    for number in range(30):
        assert client.move(nth_key(number % 3), 1 + number).status_code == 201
    run(mixed, "check", "--wait", "60")
    run(mixed, "sink", *STRATEGIES, "--until-caught-up")
    for _ in range(2):
        sinks = json.loads(run(mixed, "check", "--json"))["sinks"]
        drifts = {sink["name"]: one["drift"] for sink in sinks for one in sink["comparisons"]}
        assert drifts == {sink: {} for sink in STRATEGIES}
        run(mixed, "rebuild", "dedup", "--from", "source", "--yes")


# An older state, and a replica ---------------------------------------------------------------------------------------


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
    with server.running(), servers.address_of(topic, server) as address:
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
def replicated(topic: Settings, homes: Homes) -> Iterator[tuple[Postgres, Replica]]:
    """A primary with a migrated source, and its replica."""
    if chosen_postgres() < FAILOVER_SINCE:
        pytest.skip("this server does not copy slots to a replica")
    first, second = ports.choose(0, 0)
    of_primary, of_replica = homes.new("primary"), homes.new("replica")
    for home in (of_primary, of_replica):
        internals.read(topic.home).write(home)
    settings = topic.replace(home=of_primary, source_db_url=topic.source_db_url.replace(port=first))
    primary = Primary(settings)
    replica = Replica(topic.replace(home=of_replica, source_db_url=topic.source_db_url.replace(port=second)), primary)
    try:
        primary.start()
        migrate(settings)
        replica.start()
        yield primary, replica
    finally:
        replica.kill()
        primary.kill()


@pytest.mark.recovery
def test_source_that_failed_over_to_a_replica(
    topic: Settings, replicated: tuple[Postgres, Replica], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    domain, (primary, replica) = suite.copied_to(tmp_path / "project"), replicated
    file = domain / "connect" / "outbox.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "slot.failover": "true"}))
    monkeypatch.setenv(project.VARIABLE, str(domain))
    with servers.address_of(topic, primary) as address:
        settings = topic.replace(source_db_url=topic.source_db_url.replace(port=address.port))
        one = Rehearsal(settings, client_of(settings), "The source failed over to a replica")
        lifecycle.apply(settings)
        try:
            one.working(1, 2)

            def is_synchronised() -> bool:
                # A copied slot is temporary until the slot of the primary has moved beyond the state in which the
                # replica began to copy it. Only events move it, and what the primary logs of its transactions every
                # 15 s.
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


# What Kafka has lost, on a stack to break -----------------------------------------------------------------------------

OF_CONNECT = ("outbox.connect.configs", "outbox.connect.offsets", "outbox.connect.status")


@pytest.fixture
def rehearsal(home_stack: Stack) -> Rehearse:
    """The rehearsal of an entry on the stack of these tests."""
    settings = home_stack.settings
    lifecycle.apply(settings)
    return lambda title: Rehearsal(settings, client_of(settings), title)


def has_connector(settings: Settings) -> bool:
    return lifecycle.status(settings).connector != "MISSING"


@pytest.mark.recovery
def test_config_topic_of_connect_that_was_lost(home_stack: Stack, rehearsal: Rehearse) -> None:
    one = rehearsal("Connect's own topics are lost")
    one.working(1, 2)
    home_stack.part("connect").stop()
    delete_topics(one.settings, *OF_CONNECT)
    one.move(3)
    home_stack.up()
    assert not has_connector(one.settings)
    one.diagnosed()
    one.follow()
    one.sound()
    assert duplicates(read(one.settings)) == 0


@pytest.mark.recovery
def test_kafka_that_has_lost_all_its_data(home_stack: Stack, rehearsal: Rehearse) -> None:
    one = rehearsal("Kafka's data is lost entirely")
    one.working(1, 2)
    one.run("prune", "--keep-hours", "0")  # on no topic and in no outbox soon, but applied
    one.working(4)
    applied = Database(one.settings).applied()
    home_stack.part("connect").stop()
    home_stack.part("kafka").stop()
    one.move(5)
    shutil.rmtree(home_stack.part("kafka").folder / "data")
    home_stack.up()
    assert not topics.exists(one.settings, topic_of(one.settings))
    one.diagnosed()
    one.follow(slice(1))
    assert failure_codes(catch_up(one.settings, SINK)) == ["topic-recreated"]
    one.follow(slice(1, None))
    assert Database(one.settings).applied() == applied + 1, "nothing was applied twice"
    one.sound()
