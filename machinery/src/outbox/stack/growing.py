"""A log file that another process writes."""

from __future__ import annotations

from pathlib import Path


class GrowingFile:
    """The lines that a file gets from now on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0

    def lines(self) -> list[str]:
        """The complete lines since the last call. A file that was truncated is read from its beginning."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            if file.seek(0, 2) < self._offset:
                self._offset = 0
            file.seek(self._offset)
            complete = file.read().rpartition(b"\n")[0]
        if not complete:
            return []
        self._offset += len(complete) + 1
        return complete.decode(errors="replace").split("\n")
