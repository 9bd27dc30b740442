"""One Kafka broker in KRaft mode, as a controlled process."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from outbox.base.errors import Failure
from outbox.base.settings import Settings
from outbox.kafka.clients import client_config
from outbox.stack import config, ports
from outbox.stack.jvm import Jvm


class Kafka(Jvm):
    """Broker and controller in one, on loopback; data in its folder."""

    main_class = "kafka.Kafka"
    format_options: Sequence[str] = ()

    def __init__(self, settings: Settings) -> None:
        super().__init__("kafka", settings.home)
        self._settings = settings
        self.bootstrap = settings.kafka_bootstrap
        self.controller_port = settings.stack_controller_port
        self._port = int(self.bootstrap.rpartition(":")[2])
        self._config = self.folder / "server.properties"
        self._data = self.folder / "data"

    def arguments(self) -> Sequence[str | Path]:
        return [self._config]

    def prepare(self) -> None:
        ports.require_free(self._port, "kafka")
        ports.require_free(self.controller_port, "kafka's controller")
        added = "".join(f"{name}={value}\n" for name, value in self.properties().items())
        self._config.write_text(config.file(config.BROKER).read_text() + added)
        self._format()

    def properties(self) -> Mapping[str, str]:
        """Properties to add to the broker's file; the last of two equal names counts."""
        return {
            "listeners": f"CLIENT://{self.bootstrap},CONTROLLER://{ports.LOOPBACK}:{self.controller_port}",
            "advertised.listeners": f"CLIENT://{self.bootstrap}",
            "controller.quorum.voters": f"1@{ports.LOOPBACK}:{self.controller_port}",
            "log.dirs": "data",  # in its working directory: a properties file cannot contain every path
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
        tool = [*self.java(), "kafka.tools.StorageTool", "format", "--ignore-formatted", *self.format_options]
        argv = [*tool, "--cluster-id", uuid.uuid4().hex[:22], "--config", self._config]
        done = self._run(argv)
        if done.returncode != 0:
            raise Failure(f"formatting Kafka's storage failed: {done.stdout}{done.stderr}", code="kafka-format-failed")
