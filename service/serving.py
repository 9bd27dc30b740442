"""gunicorn's configuration, which `outbox serve` hands over by this module's name."""

from __future__ import annotations

import os
import shutil

from gunicorn.glogging import Logger  # type: ignore[import-untyped]

from outbox.base import log
from outbox.base import settings as configuration
from service.database import bound_waits
from service.metrics import FOLDER_VARIABLE

_settings = configuration.load()
log.configure(_settings)

bind = f"{_settings.service_host}:{_settings.service_port}"
workers = _settings.service_workers
worker_class = "gthread"
threads = _settings.service_threads
graceful_timeout = 20  # longer than the longest transaction: SIGTERM lets every request that has come in be answered
control_socket_disable = True


class logger_class(Logger):  # type: ignore[misc]  # noqa: N801 - gunicorn's name of the setting
    """gunicorn's own records go where ours go, from the first one on."""

    def setup(self, cfg: object) -> None:
        """Let the handlers of the root logger have them."""
        super().setup(cfg)
        self.error_log.handlers.clear()
        self.error_log.propagate = True


def post_worker_init(_: object) -> None:
    """A worker's process is the service's own."""
    bound_waits()


def on_exit(_: object) -> None:
    """The workers have counted in files."""
    shutil.rmtree(os.environ[FOLDER_VARIABLE], ignore_errors=True)
