"""The configuration files of broker, worker and Spark cluster. The project's own in its folder ``connect`` win."""

from __future__ import annotations

from pathlib import Path

from outbox.base import project

BROKER, WORKER, LOGGING = "broker.properties", "worker.properties", "log4j2.properties"
SPARK_LOGGING = "spark-log4j2.properties"
OURS = Path(__file__).parent


def file(name: str) -> Path:
    """The project's own file, or else ours."""
    return project.current().file(OURS / name)
