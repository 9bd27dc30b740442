"""An older release of a project, in a folder of its own."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from outbox.base.errors import Failure

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
