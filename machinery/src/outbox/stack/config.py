"""The configuration files of broker and worker. A file of the same name in the project's folder ``connect`` wins."""

from __future__ import annotations

from pathlib import Path

from outbox.base import project

BROKER, WORKER, LOGGING = "broker.properties", "worker.properties", "log4j2.properties"
OURS = Path(__file__).parent


def file(name: str) -> Path:
    """The project's own file, or else ours."""
    own = project.current().connect / name
    return own if own.exists() else OURS / name
