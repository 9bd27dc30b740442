"""The configuration files of broker, worker and Spark cluster. The project's own in its folder ``connect`` win."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from outbox.base import project

BROKER, WORKER, LOGGING = "broker.properties", "worker.properties", "log4j2.properties"
SPARK_LOGGING = "spark-log4j2.properties"
OURS = Path(__file__).parent


def file(name: str) -> Path:
    """The project's own file, or else ours."""
    return project.current().file(OURS / name)


def with_properties(name: str, properties: Mapping[str, str]) -> str:
    """The content of a file of properties with further ones. The last of two equal names counts."""
    return file(name).read_text() + "".join(f"{name}={value}\n" for name, value in properties.items())
