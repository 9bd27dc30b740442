"""Processes that work for an older release of the project."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from outbox.base import project
from outbox.stack.command import ServiceCommand
from outbox.walkthrough.processes import SinkProcess

START_TIMEOUT_S = 300.0  # beside clients, and whatever else starts again after a fault


class ReleasedService(ServiceCommand):
    """A service that works for the project, or for the release in ``release`` when it starts."""

    start_timeout_s = START_TIMEOUT_S
    release: Path | None = None

    def env(self) -> Mapping[str, str]:
        return {**super().env(), **_environment(self.release)}


class ReleasedSinks(SinkProcess):
    """Sinks that do the same."""

    start_timeout_s = START_TIMEOUT_S
    release: Path | None = None

    def env(self) -> Mapping[str, str]:
        return {**super().env(), **_environment(self.release)}


def _environment(release: Path | None) -> Mapping[str, str]:
    if release is None:
        return {}
    paths = [str(release), os.environ.get("PYTHONPATH", "")]
    return {project.VARIABLE: str(release), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
