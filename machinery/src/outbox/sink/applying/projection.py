"""The projections: SQL files that apply what is in ``new_events`` to the project's own tables.

A projection may have two sections. ``-- [refuse]`` inserts into ``rejections`` (event_id, reason, detail) the new
events that it cannot apply; they become dead letters, and no projection of the sink applies them. ``-- [apply]``
applies the rest. Without sections all of the file applies.

A projection that must see the events of a key in order has a line ``-- ordered`` in its header; it needs a job with a
version. Then an event is parked while an earlier event of its key is an open dead letter: it becomes a dead letter
itself, and is replayed behind the other.

``NAME.sql`` serves strategies that take events, ``NAME.states.sql`` those that take states; ``NAME.rebuild.sql`` sets
the table to what the source says (`outbox.sink.repair.rebuild`), unless a comparison of rows declares the table.
``NAME.erase.sql`` removes a key from it (`outbox.maintenance.erase`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from outbox.base.errors import Failure
from outbox.base.sections import sql_sections

ORDERED = re.compile(r"^--[ \t]*ordered[ \t]*([:=].*)?$", re.MULTILINE | re.IGNORECASE)


@dataclass(frozen=True)
class Projection:
    """One projection, with its SQL to refuse and to apply."""

    file: Path
    refuse: str
    apply: str
    is_ordered: bool

    @property
    def name(self) -> str:
        """The file's name without its ending."""
        return self.file.name.removesuffix(".sql")


def load(folder: Path, takes: Literal["events", "states"]) -> list[Projection]:
    """The projections of a folder that apply what a strategy takes.

    Raises Failure if the folder has no such projection, and for a file whose header or sections have a typing mistake.
    """
    files = {file.name.removesuffix(".sql"): file for file in sorted(folder.glob("*.sql"))}
    plain = [name for name in files if "." not in name]
    names = [f"{name}.states" if takes == "states" else name for name in plain]
    found = [_read(files[name]) for name in names if name in files]
    if not found:
        suffix = ".states.sql" if takes == "states" else ".sql"
        raise Failure(
            f"{folder} has no projection for a strategy that takes {takes}",
            f"write one as NAME{suffix}",
            code="projection-unusable",
        )
    return found


def rebuild_files(folder: Path) -> list[Path]:
    """The files ``NAME.rebuild.sql`` of projections."""
    return sorted(folder.glob("*.rebuild.sql"))


def without_rebuild(folder: Path) -> list[str]:
    """The names of the projections without such a file."""
    names = {file.name.partition(".")[0] for file in folder.glob("*.sql")}
    return sorted(names - {file.name.partition(".")[0] for file in rebuild_files(folder)})


def _read(file: Path) -> Projection:
    """Raises Failure if its header or its sections have a typing mistake."""
    sections = sql_sections(file, "apply", "refuse")
    return Projection(
        file=file,
        refuse=sections.get("refuse", "").strip(),
        apply=sections["apply"],
        is_ordered=_is_ordered(file),
    )


def _is_ordered(file: Path) -> bool:
    values = ORDERED.findall(file.read_text())
    if any(values):
        raise Failure(
            f"{file}: its header has `ordered` with a value: {' '.join(filter(None, values))}",
            "write it as `-- ordered`, or delete the line",
            code="projection-unusable",
        )
    return bool(values)
