"""outbox serve: the service under gunicorn."""

from __future__ import annotations

import importlib
import os
import sys
import tempfile

import click

from outbox import settings as configuration

# The sample is known by name only: it imports the machinery, never the reverse.
APP_MODULE = "service.app"
GUNICORN_MODULE = "service.serving"


@click.command()
def serve() -> None:
    """Run the service under gunicorn until SIGTERM, which lets it finish what it is doing."""
    # A setting that it refuses is told here in one line, not by each worker in a traceback.
    importlib.import_module(APP_MODULE).create_app(configuration.load())
    # Workers count in files, so that /metrics can sum them up; prometheus_client reads this when it is imported.
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = tempfile.mkdtemp(prefix="outbox-metrics-")
    gunicorn = [sys.executable, "-m", "gunicorn", "--config", f"python:{GUNICORN_MODULE}", f"{APP_MODULE}:create_app()"]
    os.execv(sys.executable, gunicorn)  # noqa: S606
