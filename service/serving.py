"""gunicorn's configuration, which `outbox serve` hands over by this module's name."""

from __future__ import annotations

import logging
import os
import shutil

from outbox import log
from outbox import settings as configuration
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


def on_starting(_: object) -> None:
    """gunicorn's own records go where ours go; Alembic's, a few for each look at the schema, nowhere."""
    records = logging.getLogger("gunicorn.error")
    records.handlers.clear()
    records.propagate = True
    logging.getLogger("alembic").setLevel(logging.WARNING)


def post_worker_init(_: object) -> None:
    """A worker's process is the service's own."""
    bound_waits()


def on_exit(_: object) -> None:
    """The workers have counted in files."""
    shutil.rmtree(os.environ[FOLDER_VARIABLE], ignore_errors=True)
