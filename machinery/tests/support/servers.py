"""Servers of Postgres that take each other's place behind one address, and the ways in which data gets from one to the
next: a dump, `pg_upgrade`, logical replication, a copy of the disk.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec
import pytest

from outbox.base.settings import Settings
from outbox.base.wait import wait_for
from outbox_lab.soak.proxy import Proxy
from outbox_lab.stack import internals, ports
from outbox_lab.stack.postgres import MAJOR, NAMED, UNPRIVILEGED, Postgres, give, packaged, unprivileged
from outbox_lab.testing.homes import Homes

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


def run_client(postgres: Postgres, settings: Settings, program: str, *words: str | Path, given: str = "") -> str:
    """Run a client program of Postgres as the superuser, and return what it printed."""
    environment = {
        "PGHOST": postgres.psql_host,
        "PGPORT": str(postgres.port),
        "PGUSER": "postgres",
        "PGPASSWORD": postgres.password,
    }
    argv = [str(word) for word in (postgres.program(program), *words)]
    done = subprocess.run(argv, env=environment, input=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


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
