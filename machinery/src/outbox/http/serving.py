"""gunicorn's configuration. `outbox serve` passes it by this module's name."""

from __future__ import annotations

import os
import shutil

from gunicorn.glogging import Logger  # type: ignore[import-untyped]

from outbox.base import log
from outbox.base.settings import load
from outbox.events import catalog
from outbox.http.database import bound_waits
from outbox.http.gate import FOLDER_VARIABLE
from outbox.http.worker import Worker

_settings = load()
log.configure(_settings, is_personal=catalog.of_project(_settings).is_personal)

bind = _settings.service_bind
workers = _settings.service_workers
worker_class = "outbox.http.worker.Worker"
threads = _settings.service_threads
graceful_timeout = 20  # longer than the longest transaction, so SIGTERM completes every request that has arrived
control_socket_disable = True


class logger_class(Logger):  # type: ignore[misc]  # noqa: N801 - gunicorn's name of the setting
    """Send gunicorn's records to our log, from the first one on."""

    def setup(self, cfg: object) -> None:
        super().setup(cfg)
        self.error_log.handlers.clear()
        self.error_log.propagate = True


def post_worker_init(worker: Worker) -> None:
    """Bound the waits of a worker: for its clients, and for the database."""
    worker.request_timeout_s = _settings.service_request_timeout_s
    bound_waits()


def on_exit(_: object) -> None:
    shutil.rmtree(os.environ[FOLDER_VARIABLE], ignore_errors=True)
