"""One Kafka Connect worker with Debezium in its plugin folder, as a controlled process."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from outbox.base import envfile
from outbox.base.settings import Settings
from outbox.jvm.jars import resolve
from outbox.kafka.clients import jaas
from outbox_lab.stack import config, internals, ports
from outbox_lab.stack.kafka import MECHANISM, WORKER, Jvm

# That of worker.properties. A connector may bring others, and one that reads files says in an error what it has read.
PROVIDER = "org.apache.kafka.common.config.provider.EnvVarConfigProvider"
ALLOWED = "org.apache.kafka.automatic.config.providers"
BASIC_AUTH = "org.apache.kafka.connect.rest.basic.auth.extension"
JAAS = f'KafkaConnect {{ {BASIC_AUTH}.PropertyFileLoginModule required file="users.properties"; }};\n'
FETCH_WAITS = 4  # a worker that may be slow to poll may be slow to fetch; connect.sh has it too
CLIENTS = ("", "producer.", "consumer.", "admin.")  # the worker's, and those that it does not pass its settings to


class Connect(Jvm):
    """A distributed worker with REST on loopback; exactly-once as in the settings when it starts.

    Its environment has no secret, because a connector's configuration may refer to any variable in any field, and some
    fields come back in errors. Debezium's driver finds the password of its role in a file, by the server's address.

    Other workers of its group need names, and REST ports in their settings, of their own.
    """

    main_class = "org.apache.kafka.connect.cli.ConnectDistributed"
    heap = "512m"
    heap_at_start = "512m"  # while it grows, collecting its young part is a tenth of the relay's work

    def __init__(self, settings: Settings, name: str = "connect") -> None:
        super().__init__(name, settings.home)
        self._settings = settings
        self.url = settings.connect_url
        self._config = self.folder / "worker.properties"

    def arguments(self) -> Sequence[str | Path]:
        return [self._config]

    def java(self) -> Sequence[str | Path]:
        program, *options = super().java()
        return [program, "-Djava.security.auth.login.config=jaas.conf", f"-D{ALLOWED}={PROVIDER}", *options]

    def env(self) -> Mapping[str, str]:
        settings = self._settings
        return {
            "OUTBOX_KAFKA_BOOTSTRAP": settings.kafka_bootstrap,
            "OUTBOX_CONNECT_LISTENER": settings.connect_url,
            "OUTBOX_CONNECT_EXACTLY_ONCE": "enabled" if settings.exactly_once else "disabled",
            "OUTBOX_CONNECT_FETCH_MAX_WAIT_MS": str(FETCH_WAITS * settings.connector_poll_interval_ms),
            "PGPASSFILE": "pgpass",
        }

    def properties(self) -> Mapping[str, str]:
        """Properties to add to the worker's file; the last of two equal names counts."""
        password = internals.read(self.home).connect_password.get_secret_value()
        client = {
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": MECHANISM,
            "sasl.jaas.config": jaas(MECHANISM, WORKER, password),
        }
        return {
            **{f"{prefix}{name}": value for prefix in CLIENTS for name, value in client.items()},
            "rest.extension.classes": f"{BASIC_AUTH}.BasicAuthSecurityRestExtension",
        }

    def has_requested_mode(self) -> bool:
        """Whether the running worker was started with exactly-once as the settings request now."""
        mode = "OUTBOX_CONNECT_EXACTLY_ONCE"
        return all(process.environ().get(mode) == self.env()[mode] for process in self.processes())

    def prepare(self) -> None:
        settings = self._settings
        ports.require_free(urlsplit(settings.connect_url).port or 0, "connect")
        server = ":".join(map(str, (settings.connect_source_db_url or settings.source_db_url).server))
        password = re.sub(r"([\\:])", r"\\\1", settings.source_db_cdc_password.get_secret_value())
        # All paths are relative to its working directory: neither Java's options nor its files can contain every path.
        for name, content in {
            self._config.name: config.with_properties(config.WORKER, self.properties()),
            "jaas.conf": JAAS,
            "users.properties": "{}={}\n".format(*settings.connect_login or ("", "")),
            "pgpass": f"{server}:*:*:{password}\n",
        }.items():
            envfile.write_private(self.folder / name, content)
        plugins = self.folder / "plugins"  # worker.properties names it relative to the working directory
        plugins.unlink(missing_ok=True)
        plugins.symlink_to(resolve("plugin"))

    def is_ready(self) -> bool:
        # The root answers before the worker has joined its group; the list of connectors does not.
        return ports.answers(f"{self._settings.connect_url}/connectors", self._settings.connect_login)
