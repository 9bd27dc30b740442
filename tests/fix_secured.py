"""Servers as others run them: our parts, started so that they take nothing but TLS and logins, on free ports.

The wheel's Postgres cannot speak TLS, so this one is another build of the same version.
"""

from __future__ import annotations

import os
import platform
import pwd
import secrets
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psycopg2
import pytest
import requests
import trustme
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, load_pem_private_key, pkcs12
from cryptography.x509 import load_pem_x509_certificate

from outbox.base.settings import PREFIX, Settings, load
from outbox.jvm.jars import class_path, resolve
from outbox.stack import envfile, ports
from outbox.stack.connect import Connect, worker_file
from outbox.stack.kafka import Kafka
from outbox.stack.postgres import UNPRIVILEGED, Postgres
from tests.paths import ROOT
from tests.support.archive import unpack
from tests.support.homes import TEST_HOMES, Homes

SYSTEM = {"linux": "linux", "darwin": "darwin"}.get(sys.platform)
MACHINE = {"x86_64": "amd64", "amd64": "amd64", "aarch64": "arm64v8", "arm64": "arm64v8"}.get(platform.machine())
IVY = f"""\
<ivy-module version="2.0">
  <info organisation="outbox" module="tests"/>
  <configurations>
    <conf name="postgres" description="a Postgres that speaks TLS"/>
    <conf name="connect" description="basic auth for Connect, a part of Kafka's distribution"/>
  </configurations>
  <dependencies>
    <dependency org="io.zonky.test.postgres" name="embedded-postgres-binaries-{SYSTEM}-{MACHINE}" rev="18.4.0"
      conf="postgres->default"/>
    <dependency org="org.apache.kafka" name="connect-basic-auth-extension" rev="4.3.1" conf="connect->default"
      transitive="false"/>
  </dependencies>
</ivy-module>
"""
PAGE = (ROOT / "docs" / "bring-your-own.md").read_text()
CLIENTS = ("", "producer.", "consumer.", "admin.")


class Certificates:
    """An authority of our own, and what it gives a server on loopback: known by its address and by no name."""

    def __init__(self, folder: Path) -> None:
        authority, other = trustme.CA(), trustme.CA()
        server = authority.issue_cert(ports.LOOPBACK)
        self.authority, self.other = folder / "ca.pem", folder / "other-ca.pem"
        authority.cert_pem.write_to_path(self.authority)
        other.cert_pem.write_to_path(self.other)
        self.key, self.certificate = folder / "server.key", folder / "server.pem"
        self.key.touch(mode=0o600)
        server.private_key_pem.write_to_path(self.key)
        server.cert_chain_pems[0].write_to_path(self.certificate)
        # What Java reads.
        self.keystore, self.keystore_password = folder / "server.p12", secrets.token_urlsafe(12)
        key = load_pem_private_key(server.private_key_pem.bytes(), password=None)
        certificate = load_pem_x509_certificate(server.cert_chain_pems[0].bytes())
        encrypted = BestAvailableEncryption(self.keystore_password.encode())
        self.keystore.write_bytes(pkcs12.serialize_key_and_certificates(b"server", key, certificate, None, encrypted))  # type: ignore[arg-type]


class SecuredPostgres(Postgres):
    """Over TCP it takes TLS only; the superuser, who makes the roles, comes by a socket."""

    def __init__(self, settings: Settings, certificates: Certificates) -> None:
        super().__init__(settings)
        self._certificates = certificates
        self._hba = self.home / "pg_hba.conf"
        self.psql_host = tempfile.mkdtemp(prefix="outbox-")  # a socket's path has to be short
        if os.geteuid() == 0:
            os.chown(self.psql_host, pwd.getpwnam(UNPRIVILEGED).pw_uid, -1)

    def program(self, name: str) -> Path:
        """It comes without clients."""
        return super().program(name) if name == "psql" else _server() / "bin" / name

    def prepare(self) -> None:
        self._hba.write_text("local all postgres scram-sha-256\nhostssl all all 127.0.0.1/32 scram-sha-256\n")
        super().prepare()

    def options(self) -> Mapping[str, str | int | Path]:
        return {
            **super().options(),
            "unix_socket_directories": self.psql_host,
            "hba_file": self._hba,
            "ssl": "on",
            "ssl_cert_file": self._certificates.certificate,
            "ssl_key_file": self._certificates.key,
        }

    def stop(self) -> None:
        super().stop()
        shutil.rmtree(self.psql_host)


class SecuredKafka(Kafka):
    """SASL_SSL with SCRAM for clients; the broker logs in at itself likewise."""

    def __init__(self, settings: Settings, certificates: Certificates) -> None:
        super().__init__(settings)
        self._certificates = certificates
        self._password = secrets.token_urlsafe(12)
        users = {"broker": self._password, settings.kafka_username: settings.kafka_password.get_secret_value()}
        added = [f"SCRAM-SHA-512=[name={name},password={password}]" for name, password in users.items()]
        self.format_options = [word for user in added for word in ("--add-scram", user)]

    def properties(self) -> Mapping[str, str]:
        login = f'username="broker" password="{self._password}"'
        return {
            **super().properties(),
            "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,CLIENT:SASL_SSL",
            "sasl.enabled.mechanisms": "SCRAM-SHA-512",
            "sasl.mechanism.inter.broker.protocol": "SCRAM-SHA-512",
            "listener.name.client.scram-sha-512.sasl.jaas.config": (
                f"org.apache.kafka.common.security.scram.ScramLoginModule required {login};"
            ),
            "ssl.keystore.type": "PKCS12",
            "ssl.keystore.location": str(self._certificates.keystore),
            "ssl.keystore.password": self._certificates.keystore_password,
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": str(self._certificates.authority),
        }


class SecuredConnect(Connect):
    """The worker with the lines of docs/bring-your-own.md: SASL_SSL to Kafka, HTTPS with basic auth."""

    def __init__(self, settings: Settings, certificates: Certificates) -> None:
        super().__init__(settings)
        self._certificates = certificates
        self._worker = self.folder / "worker.properties"
        self._jaas = self.folder / "jaas.conf"
        self._users = self.folder / "users.properties"
        self._login = (settings.connect_username or "", settings.connect_password.get_secret_value())

    def arguments(self) -> Sequence[str | Path]:
        return [self._worker]

    def java(self) -> Sequence[str | Path]:
        *options, jars = super().java()
        added = class_path("connect", ivy_file=_ivy_file())
        return [options[0], f"-Djava.security.auth.login.config={self._jaas}", *options[1:], f"{jars}:{added}"]

    def env(self) -> Mapping[str, str]:
        settings = self._settings
        return {
            **super().env(),
            "OUTBOX_KAFKA_USERNAME": settings.kafka_username or "",
            "OUTBOX_KAFKA_PASSWORD": settings.kafka_password.get_secret_value(),
            "OUTBOX_KAFKA_CAFILE": str(settings.kafka_cafile),
            "OUTBOX_CONNECT_KEYSTORE": str(self._certificates.keystore),
            "OUTBOX_CONNECT_KEYSTORE_PASSWORD": self._certificates.keystore_password,
        }

    def prepare(self) -> None:
        super().prepare()
        provider, *client = shown("config.providers.env.param.allowlist")
        lines = [provider, *(prefix + line for prefix in CLIENTS for line in client), *shown("listeners.https.ssl")]
        self._worker.write_text(worker_file().read_text() + "\n".join(lines) + "\n")
        module = "org.apache.kafka.connect.rest.basic.auth.extension.PropertyFileLoginModule"
        self._jaas.write_text(f'KafkaConnect {{ {module} required file="{self._users}"; }};\n')
        self._users.write_text("{}={}\n".format(*self._login))

    def is_ready(self) -> bool:
        url, cafile = f"{self._settings.connect_url}/connectors", str(self._settings.connect_cafile)
        try:
            return requests.get(url, timeout=2, auth=self._login, verify=cafile).ok
        except requests.RequestException:
            return False


def shown(beginning: str) -> list[str]:
    """The lines of the one block of the page that begins so."""
    blocks = [block.split("\n    ") for block in PAGE.split("\n\n    ")[1:]]
    (block,) = [block for block in blocks if block[0].startswith(beginning)]
    return [*block[:-1], block[-1].partition("\n")[0]]


@dataclass(frozen=True)
class Secured:
    """Servers of somebody else, and what one has to set to use them."""

    settings: Settings  # of a home that no stack of ours was ever in
    certificates: Certificates
    postgres: SecuredPostgres

    @property
    def variables(self) -> dict[str, str]:
        """The settings as environment variables."""
        return {name: value for name, value in self.settings.as_env().items() if "_STACK_" not in name}

    def secrets(self) -> set[str]:
        """What must not be printed."""
        return {
            value.get_secret_value()
            for name in type(self.settings).model_fields
            if hasattr(value := getattr(self.settings, name), "get_secret_value") and value.get_secret_value()
        }


@pytest.fixture(scope="module")
def secured(homes: Homes) -> Iterator[Secured]:
    """Postgres, Kafka and Connect, all secured; stopped at the end."""
    if SYSTEM is None or MACHINE is None:
        pytest.skip(f"no Postgres that speaks TLS for {sys.platform} on {platform.machine()}")
    home = homes.new("secured")
    certificates = Certificates(home)
    settings = _settings(home, certificates)
    postgres = SecuredPostgres(settings, certificates)
    parts = [postgres, SecuredKafka(settings, certificates), SecuredConnect(settings, certificates)]
    try:
        for part in parts:
            part.start()
        yield Secured(settings.model_copy(update={"home": home / "user"}), certificates, postgres)
    finally:
        for part in reversed(parts):
            part.stop()


def _settings(home: Path, certificates: Certificates) -> Settings:
    generated = {name.removeprefix(PREFIX).lower(): value for name, value in envfile.generate().items()}
    postgres, kafka, controller, connect, service = ports.choose(0, 0, 0, 0, 0)
    databases = {
        f"{database}_{name}": value
        for database in ("ledger", "balances")
        for name, value in {
            "port": postgres,
            "sslmode": "verify-full",
            "sslrootcert": certificates.authority,
        }.items()
    }
    return load(
        home,
        environment=False,
        **generated,
        **databases,
        stack_controller_port=controller,
        kafka_bootstrap=f"{ports.LOOPBACK}:{kafka}",
        kafka_security_protocol="SASL_SSL",
        kafka_username="ledger",
        kafka_password=secrets.token_urlsafe(24),
        kafka_cafile=certificates.authority,
        connect_url=f"https://{ports.LOOPBACK}:{connect}",
        connect_username="ledger",
        connect_password=secrets.token_urlsafe(24),
        connect_cafile=certificates.authority,
        service_port=service,
        service_workers=1,
    )


def _ivy_file() -> Path:
    """The file for this machine. Ivy's answers are kept by what is in it."""
    file = TEST_HOMES / "ivy.xml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(IVY)
    return file


def _server() -> Path:
    """The folder of the Postgres that speaks TLS, unpacked once a clone: it has to be where its user may look."""
    jars = resolve("postgres", ivy_file=_ivy_file())
    server = TEST_HOMES / f"postgres {jars.parent.name}"
    if not server.exists():
        with tempfile.TemporaryDirectory(dir=TEST_HOMES) as temporary:
            (jar,) = jars.glob("lib/*.jar")
            with zipfile.ZipFile(jar) as archive:
                (name,) = [name for name in archive.namelist() if name.endswith(".txz")]
                unpack(Path(archive.extract(name, temporary)), Path(temporary, "server"))
            Path(temporary, "server").rename(server)
    return server


def plain_login(settings: Settings) -> psycopg2.extensions.connection:
    """A login that knows no TLS."""
    return psycopg2.connect(
        host=settings.source_db_host,
        port=settings.source_db_port,
        dbname=settings.source_db_name,
        user="ledger_app",
        password=settings.source_db_app_password.get_secret_value(),
        sslmode="disable",
    )
