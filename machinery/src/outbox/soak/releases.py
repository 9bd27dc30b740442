"""Two releases of a project side by side: processes that work for an older one, in a folder of its own."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from outbox.base import project
from outbox.base.errors import Failure
from outbox.stack.command import ServiceCommand
from outbox.walkthrough.processes import SinkProcess

NOT_COPIED = (".*", "__pycache__", "node_modules")


class OlderRelease(NamedTuple):
    """What an older release of the project lacks: a version of an event, which the service writes today.

    Its service writes the version before, and its sinks do not know the newer one.
    """

    event: str  # order.placed
    version: int
    removed: Sequence[str]  # files of the project
    replaced: Mapping[str, Mapping[str, str]]
    """By file, a text that it has once, and what is there in the older release."""


def make(root: Path, folder: Path, older: OlderRelease) -> None:
    """Copy the project and take out what the older release lacks. Raises Failure if a text is not there once."""
    shutil.copytree(root, folder, ignore=shutil.ignore_patterns(*NOT_COPIED), symlinks=True)
    take_out(folder, older)


def take_out(folder: Path, older: OlderRelease) -> None:
    """Take out of a copy what the older release lacks. Raises Failure if a text is not there once."""
    for name in older.removed:
        (folder / name).unlink()
    for name, changes in older.replaced.items():
        text = (folder / name).read_text()
        for present, past in changes.items():
            if text.count(present) != 1:
                raise Failure(
                    f"{name} has {present!r} {text.count(present)} times: the older release cannot be made",
                    "correct `older` of the soak's domain",
                    code="soak-domain-wrong",
                )
            text = text.replace(present, past)
        (folder / name).write_text(text)


class ReleasedService(ServiceCommand):
    """A service that works for the project, or for the release in ``release`` when it starts."""

    release: Path | None = None

    def env(self) -> Mapping[str, str]:
        return {**super().env(), **_environment(self.release)}


class ReleasedSinks(SinkProcess):
    """Sinks that do the same."""

    release: Path | None = None

    def env(self) -> Mapping[str, str]:
        return {**super().env(), **_environment(self.release)}


def _environment(release: Path | None) -> Mapping[str, str]:
    if release is None:
        return {}
    paths = [str(release), os.environ.get("PYTHONPATH", "")]
    return {project.VARIABLE: str(release), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
