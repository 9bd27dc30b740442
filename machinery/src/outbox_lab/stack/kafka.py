"""One Kafka broker in KRaft mode, as a controlled process; and the command line that it shares with Connect."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from outbox.base import envfile
from outbox.base.errors import Failure
from outbox.base.settings import Settings
from outbox.jvm import archive
from outbox.jvm.jars import class_path, jars
from outbox.jvm.java import java
from outbox.kafka.clients import client_config, jaas
from outbox_lab.stack import config, internals, ports
from outbox_lab.stack.process import Process

MECHANISM = "SCRAM-SHA-256"
BROKER, WORKER, CLIENT = "broker", "connect", "outbox"  # who logs in: the broker at itself, Connect, all commands


class Jvm(Process):
    """A controlled JVM on the jars of the `kafka` configuration."""

    poll_s = 0.3  # a question is work for a JVM that starts, and delays it
    heap = "384m"
    heap_at_start = "64m"
    main_class: str

    def arguments(self) -> Sequence[str | Path]:
        """The arguments of the main class."""
        raise NotImplementedError

    def argv(self) -> Sequence[str | Path]:
        return [*self.java(), self.main_class, *self.arguments()]

    def java(self) -> Sequence[str | Path]:
        """A bounded JVM. The serial collector needs the least memory and no core of its own."""
        options = [
            f"-Xmx{self.heap}",
            f"-Xms{self.heap_at_start}",
            "-XX:+UseSerialGC",
            "-XX:+ExitOnOutOfMemoryError",
            "-Djava.awt.headless=true",
        ]
        return [
            java(),
            *options,
            *archive.options(self.name, jars("kafka")),
            f"-Dlog4j2.configurationFile={config.file(config.LOGGING).as_uri()}",
            "-cp",
            class_path("kafka"),
        ]


class Kafka(Jvm):
    """Broker and controller in one, on loopback, with a login on every port; data in its folder."""

    main_class = "kafka.Kafka"
    listeners: Sequence[str] = ("CLIENT",)

    def __init__(self, settings: Settings) -> None:
        super().__init__("kafka", settings.home)
        self._settings = settings
        self.bootstrap = settings.kafka_bootstrap
        self._port = int(self.bootstrap.rpartition(":")[2])
        self._config = self.folder / "server.properties"
        self._data = self.folder / "data"

    def arguments(self) -> Sequence[str | Path]:
        return [self._config]

    def prepare(self) -> None:
        ports.require_free(self._port, "kafka")
        ports.require_free(internals.read(self.home).controller_port, "kafka's controller")
        envfile.write_private(self._config, config.with_properties(config.BROKER, self.properties()))
        self._format()

    def properties(self) -> Mapping[str, str]:
        """Properties to add to the broker's file; the last of two equal names counts."""
        kept = internals.read(self.home)
        password = kept.kafka_password.get_secret_value()
        own = jaas(MECHANISM, BROKER, password)
        controller = f"{ports.LOOPBACK}:{kept.controller_port}"
        return {
            "listeners": f"CLIENT://{self.bootstrap},CONTROLLER://{controller}",
            "advertised.listeners": f"CLIENT://{self.bootstrap}",
            "controller.quorum.voters": f"1@{controller}",
            "log.dirs": "data",  # in its working directory: a properties file cannot contain every path
            "listener.security.protocol.map": ",".join(
                f"{name}:SASL_PLAINTEXT" for name in ("CONTROLLER", *self.listeners)
            ),
            "sasl.enabled.mechanisms": MECHANISM,
            "sasl.mechanism.inter.broker.protocol": MECHANISM,
            **{f"listener.name.{name}.{MECHANISM}.sasl.jaas.config".lower(): own for name in self.listeners},
            # A controller has no SCRAM: it keeps the users itself. This one has only itself to log in.
            "sasl.mechanism.controller.protocol": "PLAIN",
            "listener.name.controller.sasl.enabled.mechanisms": "PLAIN",
            "listener.name.controller.plain.sasl.jaas.config": jaas(
                "PLAIN", BROKER, password, **{f"user_{BROKER}": password}
            ),
        }

    def is_ready(self) -> bool:
        if not ports.is_open(self._port):
            return False
        admin = AdminClient({**client_config(self._settings), "log_level": 0})
        try:
            return bool(admin.list_topics(timeout=2).brokers)
        except KafkaException:
            return False

    def _format(self) -> None:
        """Format the storage once. An interrupted formatting is repeated."""
        if (self._data / "meta.properties").exists():
            return
        kept = internals.read(self.home)
        users = [
            f"--add-scram {MECHANISM}=[name={name},password={password.get_secret_value()}]"
            for name, password in (
                (BROKER, kept.kafka_password),
                (WORKER, kept.connect_password),
                (CLIENT, self._settings.kafka_password),
            )
        ]
        words = ["kafka.tools.StorageTool format --ignore-formatted --config", self._config.name, *users]
        # In a file, because everybody sees the arguments of a process.
        arguments = self.folder / "format.arguments"
        envfile.write_private(arguments, "\n".join([*words, "--cluster-id", uuid.uuid4().hex[:22]]))
        done = self._run([*self.java(), f"@{arguments.name}"])
        arguments.unlink()
        if done.returncode != 0:
            raise Failure(f"formatting Kafka's storage failed: {done.stdout}{done.stderr}", code="kafka-format-failed")
