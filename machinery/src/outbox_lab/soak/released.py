"""Processes that work for an older release of the project."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from outbox.base import project
from outbox_lab.stack.command import Command, ServiceCommand
from outbox_lab.walkthrough.processes import SinkProcess

START_TIMEOUT_S = 300.0  # beside clients, and whatever else starts again after a fault


class _Released(Command):
    """A command that works for the project, or for the release in ``release`` when it starts."""

    start_timeout_s = START_TIMEOUT_S
    release: Path | None = None

    def env(self) -> Mapping[str, str]:
        given = super().env()
        if self.release is None:
            return given
        paths = [str(self.release), os.environ.get("PYTHONPATH", "")]
        return {**given, project.VARIABLE: str(self.release), "PYTHONPATH": os.pathsep.join(filter(None, paths))}


class ReleasedService(_Released, ServiceCommand):
    """The service of a release."""


class ReleasedSinks(_Released, SinkProcess):
    """The sinks of a release."""
