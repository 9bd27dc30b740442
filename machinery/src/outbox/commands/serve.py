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

from outbox.base import project
from outbox.base.errors import Failure

GUNICORN_MODULE = "outbox.http.serving"
METRICS_PREFIX = "outbox-metrics-"


@click.command()
def serve() -> None:
    """Run the service under gunicorn. On SIGTERM it completes the requests that have arrived, and exits."""
    module, function = _app(project.current().service)
    # An invalid setting is one line here, instead of a traceback from each worker.
    getattr(importlib.import_module(module), function)()
    # Each worker counts in a file, so that /metrics can add them up.
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = _metrics_folder()
    gunicorn = [sys.executable, "-m", "gunicorn", "--config", f"python:{GUNICORN_MODULE}", f"{module}:{function}()"]
    os.execv(sys.executable, gunicorn)  # noqa: S606


def _app(name: str) -> tuple[str, str]:
    """Module and function that [tool.outbox] names."""
    module, _, function = name.partition(":")
    if not module or not function.isidentifier():
        raise Failure(
            f"[tool.outbox] service = {name!r} is not module:function",
            "name the function that makes the WSGI application, as service.app:create_app",
            code="service-name-invalid",
        )
    return module, function


def _metrics_folder() -> str:
    """A folder that stays locked while this process, the gunicorn that replaces it, or one of its workers lives.

    It first removes the folders of services that were killed: nobody holds their locks.
    """
    for stale in Path(tempfile.gettempdir()).glob(f"{METRICS_PREFIX}*"):
        with suppress(OSError):  # no folder, another user's, or locked by a living service
            lock = os.open(stale, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(lock).st_uid == os.geteuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(stale, ignore_errors=True)
            finally:
                os.close(lock)
    folder = Path(tempfile.mkdtemp(prefix=f".{METRICS_PREFIX}"))
    lock = os.open(folder, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.set_inheritable(lock, True)
    # Other services look at the final name only, so they never find this folder unlocked.
    return str(folder.rename(folder.with_name(folder.name.removeprefix("."))))
