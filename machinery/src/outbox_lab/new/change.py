"""A change of the project's files: all of it is written, or nothing."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from outbox.base import project
from outbox.base.errors import Failure
from outbox.base.settings import Settings
from outbox.events import catalog
from outbox.events.catalog import Catalog


@dataclass
class Change:
    """New files, and existing ones with what they become."""

    new: dict[Path, str] = field(default_factory=dict)
    edited: dict[Path, str] = field(default_factory=dict)
    next_steps: list[str] = field(default_factory=list)

    def write(self) -> None:
        """Write everything. Raises Failure, with nothing written, if a new file exists or a folder refuses."""
        if existing := [shown(file) for file in self.new if os.path.lexists(file)]:
            problem = f"{existing[0]} exists already, one of {len(existing)} such files"
            raise Failure(problem, "choose another name, or delete it; nothing was written", code="file-exists")
        before = {file: file.read_text("utf-8") for file in self.edited}
        done = list[Path]()
        try:
            for file, text in {**self.new, **self.edited}.items():
                _make_folder(file.parent)
                done.append(file)
                file.write_text(text, "utf-8")
                if file in self.new:
                    shutil.copymode(project.current().root / project.FILE, file)  # a command has a strict umask
        except OSError as error:
            for file in done:
                file.write_text(before[file], "utf-8") if file in before else file.unlink(missing_ok=True)
            problem = f"{error.filename or 'a file'}: {error.strerror}"
            raise Failure(problem, "nothing was written", code="files-unwritable") from None

    def declared(self, settings: Settings) -> Catalog:
        """The events as they would be. Raises Failure if they cannot be used."""
        ours = project.current().events
        with tempfile.TemporaryDirectory() as temporary:
            copy = Path(temporary, "events")
            if ours.is_dir():
                shutil.copytree(ours, copy, ignore=shutil.ignore_patterns("__pycache__"))
            for file, text in {**self.new, **self.edited}.items():
                if file.is_relative_to(ours):
                    target = copy / file.relative_to(ours)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_text(text, "utf-8")
            try:
                return catalog.load(copy, settings.topic_prefix, settings.topic_partitions)
            except Failure as failure:
                message = failure.message.replace(f"{copy}/", "")
                raise Failure(message, failure.remedy, code=failure.code) from None


def shown(file: Path) -> str:
    """A path as people read it: from the project's folder."""
    root = project.current().root
    return str(file.relative_to(root)) if file.is_relative_to(root) else str(file)


def _make_folder(folder: Path) -> None:
    if not folder.is_dir():
        _make_folder(folder.parent)
        folder.mkdir()
        shutil.copymode(project.current().root, folder)
