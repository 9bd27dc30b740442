"""outbox serve and outbox token: the service under gunicorn, and what its clients send."""

from __future__ import annotations

import importlib
import os
import sys
import tempfile

import click

from outbox.base import project
from outbox.base.errors import Failure
from outbox.base.settings import load

GUNICORN_MODULE = "outbox.http.serving"


@click.command()
def serve() -> None:
    """Run the service, of Flask or of FastAPI, under gunicorn. On SIGTERM it completes the requests that have arrived,
    and exits.
    """
    from outbox.http.gate import FOLDER_VARIABLE

    name = project.current().service
    module, _, function = name.partition(":")
    if not module or not function.isidentifier():
        raise Failure(
            f"[tool.outbox] service = {name!r} is not module:function",
            "name the function that makes the application, as service.app:create_app",
            code="project-wrong",
        )
    # An invalid setting is one line here, instead of a traceback from each worker.
    getattr(importlib.import_module(module), function)()
    # Each worker counts in a file, so that /metrics can add them up. The folder is removed at the end.
    os.environ[FOLDER_VARIABLE] = tempfile.mkdtemp(prefix="outbox-metrics-")
    gunicorn = [sys.executable, "-m", "gunicorn", "--config", f"python:{GUNICORN_MODULE}", f"{module}:{function}()"]
    os.execv(sys.executable, gunicorn)  # noqa: S606


@click.command()
def token() -> None:
    """Print the bearer token that clients of the service send, for example to a variable:

    \b
    token=$(outbox token)
    curl --header "Authorization: Bearer $token" …
    """
    found = load().service_token.get_secret_value()
    if not found:
        raise Failure(
            "there is no OUTBOX_SERVICE_TOKEN",
            "`outbox up` generates one, or set your own; with docker-compose only the service has it:"
            " docker compose exec serve python -m outbox token",
            code="service-token-missing",
        )
    click.echo(found)
