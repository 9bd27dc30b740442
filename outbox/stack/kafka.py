"""One Kafka broker in KRaft mode, as a controlled process."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from pathlib import Path

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from outbox.errors import Failure
from outbox.settings import PROJECT_ROOT, Settings
from outbox.stack import ports
from outbox.stack.jvm import Jvm

BROKER_FILE = PROJECT_ROOT / "connect" / "broker.properties"


class Kafka(Jvm):
    """Broker and controller in one, on loopback; data in its folder."""

    main_class = "kafka.Kafka"

    def __init__(self, settings: Settings) -> None:
        super().__init__("kafka", settings.home)
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
        self._config.write_text(
            BROKER_FILE.read_text()
            + f"listeners=CLIENT://{self.bootstrap},CONTROLLER://{ports.LOOPBACK}:{self.controller_port}\n"
            + f"advertised.listeners=CLIENT://{self.bootstrap}\n"
            + f"controller.quorum.voters=1@{ports.LOOPBACK}:{self.controller_port}\n"
            + "log.dirs=data\n"  # where it runs: a properties file cannot hold every path
        )
        self._format()

    def is_ready(self) -> bool:
        if not ports.is_open(self._port):
            return False
        admin = AdminClient({"bootstrap.servers": self.bootstrap, "log_level": 0})
        try:
            return bool(admin.list_topics(timeout=2).brokers)
        except KafkaException:
            return False

    def _format(self) -> None:
        """Format the storage; done once, and again after an interruption, which it tolerates."""
        if (self._data / "meta.properties").exists():
            return
        tool = [*self.java(), "kafka.tools.StorageTool", "format", "--ignore-formatted"]
        argv = [*tool, "--cluster-id", uuid.uuid4().hex[:22], "--config", self._config]
        done = self._run(argv)
        if done.returncode != 0:
            raise Failure(f"formatting Kafka's storage failed: {done.stdout}{done.stderr}")
