"""Servers that are replaced or lose their data: Postgres gets a newer major version, fails over to a replica, or is put
back to an older state of its disk; Kafka loses Connect's topics, or all.

The log of another Postgres has other positions than the offset that Connect has stored, or no slot.
"""

from __future__ import annotations

import json
import os
import pwd
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from outbox.base import project
from outbox.base.settings import Settings, SinkRole, SourceRole, password_setting
from outbox.base.wait import wait_for
from outbox.kafka import topics
from outbox.migrations.migrate import MINIMUM, migrate
from outbox.relay import lifecycle, slot
from outbox_lab.soak.proxy import Proxy
from outbox_lab.stack import internals, ports
from outbox_lab.stack.postgres import (
    HBA_FILE,
    MAJOR,
    NAMED,
    UNPRIVILEGED,
    Postgres,
    give,
    packaged,
    unprivileged,
)
from outbox_lab.stack.process import Process
from outbox_lab.stack.stack import Stack
from outbox_lab.testing.command import run
from outbox_lab.testing.fixtures.stack import chosen_postgres, private_stack
from outbox_lab.testing.helpers import query
from outbox_lab.testing.homes import Homes
from stock.service import create_app
from tests.stock import Client
from tests.support import slots, suite
from tests.support.made_events import nth_key
from tests.support.outbox_rows import ids
from tests.support.rehearsal import SINK, Rehearsal, Rehearse, failure_codes, run_client
from tests.support.sink_driver import Database
from tests.support.sink_process import catch_up
from tests.support.topic_reader import delete_topics, duplicates, read, relayed, topic_of

# Servers that take each other's place behind one address, and ways in which data gets from one to the next ----------

CHECKSUMS_SINCE = 18  # initdb's default
LOGICAL = "-c wal_level=logical -c max_replication_slots=10"
COPY = "upgrade"  # the publication and the subscription by which a server follows another one
# `pg_upgrade` starts two programs of the old version that no jar has. They come from Debian's package.
INSTALLED = "/usr/lib/postgresql/{version}/bin"


def moved(settings: Settings, port: int, *, sinks: bool) -> Settings:
    """Settings with another port for the source database; with ``sinks``, for the sink database too."""
    names = ["source_db_url", "sink_db_url"] if sinks else ["source_db_url"]
    return settings.replace(**{name: getattr(settings, name).replace(port=port) for name in names})


class Server(Postgres):
    """A server of a version, on a free port, with the databases of ``topic`` once it has started."""

    def __init__(self, topic: Settings, homes: Homes, version: int = MAJOR, *, sinks: bool = False) -> None:
        [port] = ports.choose(0)
        home = homes.new("server")
        msgspec.structs.replace(internals.read(topic.home), postgres_version=version).write(home)
        super().__init__(moved(topic, port, sinks=sinks).replace(home=home))

    @property
    def settings(self) -> Settings:
        """Settings that lead to this server directly."""
        return self._settings

    @contextmanager
    def running(self) -> Iterator[None]:
        try:
            self.start()
            yield
        finally:
            self.kill()

    def initdb(self) -> None:
        """Make its data folder, without starting it."""
        self.folder.mkdir(parents=True)
        self.prepare()

    def databases(self) -> list[str]:
        """The names of those that it serves: of the service, and of the sinks if these are here."""
        settings = self.settings
        return [settings.source_db_url.name] + [settings.sink_db_url.name] * (settings.sink_db_url.port == self.port)

    def client(self, program: str, *words: str | Path, given: str = "") -> str:
        """Run a client program as the superuser, and return what it printed."""
        return run_client(self, self.settings, program, *words, given=given)

    def restore(self, dump: str, database: str) -> None:
        """Run the statements of a dump in one of its databases."""
        self.client("psql", "-qX", "-v", "ON_ERROR_STOP=1", "-d", database, given=dump)


@contextmanager
def address_of(topic: Settings, server: Postgres) -> Iterator[Proxy]:
    """An address that leads to a server, from which Debezium gets its password for it."""
    with closing(Proxy("server", server.port)) as proxy:
        file = topic.home / "connect" / "pgpass"
        password = topic.source_db_cdc_password.get_secret_value()
        with file.open("a") as lines:
            lines.write(f"{topic.source_db_url.host}:{proxy.port}:*:*:{password}\n")
        yield proxy


def snapshot(server: Server) -> Path:
    """A copy of the disk of a server, which is stopped for it."""
    server.stop()
    copy = server.folder / "snapshot"
    shutil.copytree(server.data, copy)
    give(copy, UNPRIVILEGED)
    server.start()
    return copy


def put_back(server: Server, copy: Path) -> None:
    """Let a server have the disk of a snapshot."""
    server.stop()
    shutil.rmtree(server.data)
    copy.rename(server.data)
    server.start()


def dump(old: Server, new: Server) -> None:
    """Copy the databases by dump and restore, as the superuser of each server."""
    for name in new.databases():
        new.restore(old.client("pg_dump", name), name)


def follow(old: Server, new: Server) -> None:
    """Let the new server have the tables of the old one, and follow them by logical replication."""
    name, password = old.settings.source_db_url.name, old.password
    new.restore(old.client("pg_dump", "--schema-only", name), name)
    old.psql(f"CREATE PUBLICATION {COPY} FOR ALL TABLES", name)
    source = f"host={old.psql_host} port={old.port} user=postgres password={password} dbname={name}"
    new.psql(f"CREATE SUBSCRIPTION {COPY} CONNECTION '{source}' PUBLICATION {COPY}", name)


def leave(old: Server, new: Server) -> None:
    """Wait until the new server has all that the old one has committed, and let it follow no more."""
    name = old.settings.source_db_url.name
    end = old.psql("SELECT pg_current_wal_lsn()").stdout.strip()
    behind = f"SELECT FROM pg_replication_slots WHERE slot_name = '{COPY}' AND confirmed_flush_lsn >= '{end}'"
    copied = f"SELECT count(*) FROM ({behind}) AS caught_up"
    ready = "SELECT count(*) FROM pg_subscription_rel WHERE srsubstate <> 'r'"
    assert new.psql("SELECT count(*) FROM pg_sequences", name).stdout == "0\n", "nobody copies these"
    wait_for("the new server to have it", lambda: old.psql(copied).stdout == "1\n", timeout_s=60, poll_s=0.2)
    assert new.psql(ready, name).stdout == "0\n"
    new.psql(f"DROP SUBSCRIPTION {COPY}", name)


def pg_upgrade(old: Server, new: Server) -> subprocess.CompletedProcess[str]:
    """Upgrade the data of a server that is stopped into that of one that was never started."""
    if not new.data.exists():
        new.initdb()
        if old.version < CHECKSUMS_SINCE:  # both must have them, or neither
            subprocess.run(unprivileged([new.program("pg_checksums"), "--disable", "-D", new.data]), check=True)
    work = new.folder / "pg_upgrade"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    of_old, of_new = programs_of(old, work), new.program("psql").parent
    clusters: list[str | Path] = ["-b", of_old, "-d", old.data, "-o", LOGICAL]
    clusters += ["-B", of_new, "-D", new.data, "-O", LOGICAL]
    folders, user = (old.data, new.data, work), pwd.getpwnam(NAMED).pw_uid  # as initdb, it wants a user with a name
    try:
        for folder in folders:
            give(folder, user)
        done = subprocess.run(
            [str(word) for word in unprivileged([new.program("pg_upgrade"), "-U", "postgres", *clusters], user)],
            env={"PGPASSWORD": new.password, "PATH": os.environ["PATH"]},
            cwd=work,
            capture_output=True,
            text=True,
            check=False,
        )
        assert "wrong version" not in done.stderr, "the values of the control file would be guesses"
        return done
    finally:
        for folder in folders:
            give(folder, UNPRIVILEGED)


def programs_of(server: Server, folder: Path) -> Path:
    """A folder with the programs of an older server that `pg_upgrade` starts."""
    version = server.version
    wheel = server.program("psql").parent
    if version == MAJOR:
        return wheel
    programs = folder / "bin"
    programs.mkdir()
    jar, installed = packaged(version) / "bin", Path(INSTALLED.format(version=version))
    if not (installed / "pg_resetwal").exists():
        pytest.skip(f"apt-get install postgresql-{version}: no package of ours has its pg_controldata and pg_resetwal")
    for target in (jar / "postgres", jar / "pg_ctl", installed / "pg_controldata", installed / "pg_resetwal"):
        (programs / target.name).symlink_to(target)
    return programs


# A newer major version ------------------------------------------------------------------------------------------------

SOURCE, SINKS = "The service's Postgres gets a newer major version", "The sinks' Postgres gets a newer major version"
BEFORE, AFTER = slice(2), slice(2, None)  # the commands of the entry: on the old server, and on the new one


def client_of(settings: Settings) -> Client:
    """A client of the service in this process, on other databases than those of the fixtures."""
    app = create_app(settings.replace(service_threads=2))  # connections for a few clients
    return Client(app, settings)


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
        with address_of(topic, old) as address:
            settings = moved(topic, address.port, sinks=sinks)
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
        dump(chain.old, chain.new)
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
        done = pg_upgrade(chain.old, chain.new)
        assert done.returncode == 1
        assert "logical replication slots that cannot be upgraded" in done.stdout
        chain.old.start()
        slots.advance(one.settings)
        chain.old.stop()
        done = pg_upgrade(chain.old, chain.new)
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
        follow(chain.old, chain.new)
        one.move(3, 4)
        relayed(one.settings)
        one.follow(BEFORE)
        leave(chain.old, chain.new)
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
    with address_of(topic, primary) as address:
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
