"""A change of the project's files: all of it is written, or nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from outbox.base import project
from outbox.base.errors import Failure
from outbox.base.settings import Settings
from outbox.events import catalog
from outbox.events.catalog import Catalog

TIMEOUT_S = 60


@dataclass
class Change:
    """New files, and existing ones with what they become."""

    new: dict[Path, str] = field(default_factory=dict)
    edited: dict[Path, str] = field(default_factory=dict)
    next_steps: list[str] = field(default_factory=list)

    def add_missing(self, files: Mapping[Path, str]) -> None:
        """Add those of these files that the project does not have."""
        self.new |= {file: text for file, text in files.items() if not os.path.lexists(file)}

    def write(self) -> None:
        """Write everything. Raises Failure, with nothing written, if a new file exists or a folder refuses."""
        existing = [shown(file) for file in self.new if os.path.lexists(file)]
        if existing:
            others = f", and so do {len(existing) - 1} more files" if existing[1:] else ""
            raise Failure(
                f"{existing[0]} exists already{others}",
                "choose another name, or delete it; nothing was written",
                code="file-exists",
            )
        before = {file: file.read_text("utf-8") for file in self.edited}
        done: list[Path] = []
        try:
            for file, text in {**self.new, **self.edited}.items():
                _make_folder(file.parent)
                done.append(file)
                file.write_text(text, "utf-8")
                if file in self.new:
                    shutil.copymode(project.current().root / project.FILE, file)  # commands have a strict umask
        except OSError as error:
            for file in done:
                if file in before:
                    file.write_text(before[file], "utf-8")
                else:
                    file.unlink(missing_ok=True)
            raise Failure(
                f"{error.filename or 'a file'}: {error.strerror}", "nothing was written", code="files-unwritable"
            ) from None


def shown(file: Path) -> str:
    """A path as people read it: from the project's folder."""
    root = project.current().root
    return str(file.relative_to(root)) if file.is_relative_to(root) else str(file)


def declared(settings: Settings, change: Change) -> Catalog:
    """The events as they would be. Raises Failure if they cannot be used."""
    ours = project.current().events
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary, "events")
        if ours.is_dir():
            shutil.copytree(ours, copy, ignore=shutil.ignore_patterns("__pycache__"))
        for file, text in {**change.new, **change.edited}.items():
            if file.is_relative_to(ours):
                target = copy / file.relative_to(ours)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(text, "utf-8")
        try:
            return catalog.load(copy, settings.topic_prefix, settings.topic_partitions)
        except Failure as failure:
            places = {str(copy): shown(ours), str(copy.resolve()): shown(ours)}
            message = failure.message
            for place, name in places.items():
                message = message.replace(place, name)
            raise Failure(message, failure.remedy, code=failure.code) from None


def uncommitted() -> int:
    """How many files of the project git has not committed; 0 without git."""
    command = ["git", "status", "--porcelain", "--", "."]
    try:
        done = subprocess.run(
            command, cwd=project.current().root, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return len(done.stdout.splitlines())


def _make_folder(folder: Path) -> None:
    if not folder.is_dir():
        _make_folder(folder.parent)
        folder.mkdir()
        shutil.copymode(project.current().root, folder)
