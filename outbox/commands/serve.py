"""outbox serve: the service under gunicorn."""

from __future__ import annotations

import fcntl
import importlib
import os
import shutil
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import click

from outbox.base import settings as configuration

# The sample is known by name only: it imports the machinery, never the reverse.
APP_MODULE = "service.app"
GUNICORN_MODULE = "service.serving"
METRICS_PREFIX = "outbox-metrics-"


@click.command()
def serve() -> None:
    """Run the service under gunicorn until SIGTERM, which lets it finish what it is doing."""
    # A setting that it refuses is told here in one line, not by each worker in a traceback.
    importlib.import_module(APP_MODULE).create_app(configuration.load())
    # Workers count in files, so that /metrics can sum them up; prometheus_client reads this when it is imported.
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = _metrics_folder()
    gunicorn = [sys.executable, "-m", "gunicorn", "--config", f"python:{GUNICORN_MODULE}", f"{APP_MODULE}:create_app()"]
    os.execv(sys.executable, gunicorn)  # noqa: S606


def _metrics_folder() -> str:
    """A folder that is locked for as long as we live, or gunicorn in our place, or a worker of it.

    Those of services that were killed, and so could not remove theirs, are removed first: nobody holds their locks.
    """
    for stale in Path(tempfile.gettempdir()).glob(f"{METRICS_PREFIX}*"):
        with suppress(OSError):  # another user's, or locked: alive
            lock = os.open(stale, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(stale, ignore_errors=True)
            finally:
                os.close(lock)
    folder = Path(tempfile.mkdtemp(prefix=f".{METRICS_PREFIX}"))
    lock = os.open(folder, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.set_inheritable(lock, True)
    # Only now by a name that others look at, or they would find it unlocked.
    return str(folder.rename(folder.with_name(folder.name.removeprefix("."))))
