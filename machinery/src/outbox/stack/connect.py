"""One Kafka Connect worker with Debezium in its plugin folder, as a controlled process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from outbox.base.settings import Settings
from outbox.jvm.jars import resolve
from outbox.stack import config, ports
from outbox.stack.jvm import Jvm


class Connect(Jvm):
    """A distributed worker with REST on loopback; exactly-once as in the settings when it starts.

    Other workers of its group need names, and REST ports in their settings, of their own.
    """

    main_class = "org.apache.kafka.connect.cli.ConnectDistributed"
    heap = "512m"
    heap_at_start = "512m"  # while it grows, collecting its young part is a tenth of the relay's work

    def __init__(self, settings: Settings, name: str = "connect") -> None:
        super().__init__(name, settings.home)
        self._settings = settings

    def arguments(self) -> Sequence[str | Path]:
        return [config.file(config.WORKER)]

    def env(self) -> Mapping[str, str]:
        settings = self._settings
        return {
            "OUTBOX_KAFKA_BOOTSTRAP": settings.kafka_bootstrap,
            "OUTBOX_CONNECT_LISTENER": settings.connect_url,
            "OUTBOX_CONNECT_EXACTLY_ONCE": "enabled" if settings.exactly_once else "disabled",
            "OUTBOX_CONNECT_FETCH_MAX_WAIT_MS": str(settings.connect_fetch_max_wait_ms),
            "OUTBOX_SOURCE_DB_CDC_PASSWORD": settings.source_db_cdc_password.get_secret_value(),
        }

    def has_requested_mode(self) -> bool:
        """Whether the running worker was started with exactly-once as the settings request now."""
        mode = "OUTBOX_CONNECT_EXACTLY_ONCE"
        return all(process.environ().get(mode) == self.env()[mode] for process in self.processes())

    def prepare(self) -> None:
        ports.require_free(urlsplit(self._settings.connect_url).port or 0, "connect")
        plugins = self.folder / "plugins"  # worker.properties names it relative to the working directory
        plugins.unlink(missing_ok=True)
        plugins.symlink_to(resolve("plugin"))

    def is_ready(self) -> bool:
        # The root answers before the worker has joined its group; the list of connectors does not.
        return ports.answers(f"{self._settings.connect_url}/connectors", self._settings.connect_login)
