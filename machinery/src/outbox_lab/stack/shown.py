"""A part's log as `outbox dev` shows it: prints of the project, warnings, and errors with the frames of the project."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

QUIET = ("debug", "info")
# Levels of the servers' lines, as log4j2.properties and Postgres write them; a STATEMENT or DETAIL has values.
LEVEL = re.compile(
    r"^\d{4}-\d\d-\d\d[ T][\d:.,]+ .*?\b"
    r"(TRACE|DEBUG\d?|INFO|LOG|NOTICE|WARN|WARNING|ERROR|FATAL|PANIC|DETAIL|HINT|QUERY|CONTEXT|STATEMENT)\b:? "
)
LOUD = ("WARN", "WARNING", "ERROR", "FATAL", "PANIC")
FRAME = re.compile(r'^ +File "(.+?)", line \d+')
JVM_FRAME = re.compile(r"^\s+(at |\.\.\. \d+ more)")
# Each start of Spark prints these.
NOISE = ("NOTE: Picked up ", "WARNING: Using incubator modules", "Setting default log level", "To adjust logging level")
LEFT_OUT = ("timestamp", "level", "event", "exception", "logger")


class Shown:
    """Lines of one log, as they are shown. ``root`` is the project's folder."""

    def __init__(self, root: Path, *, verbose: bool = False) -> None:
        self._root, self._verbose = root, verbose
        self._is_foreign = False  # whether the last frame of a traceback is not of the project
        self._is_loud = True  # whether the last line with a level was shown: those below belong to it

    def lines(self, logged: Iterable[str]) -> Iterator[str]:
        """Show what a log has got since the last call."""
        for line in logged:
            record = _record(line)
            if record is None:
                yield from self._of_text(line)
            else:
                self._is_loud = True
                if self._verbose or record["level"] not in QUIET:
                    yield from self._of_record(record)

    def _of_text(self, line: str) -> Iterator[str]:
        if frame := FRAME.match(line):
            self._is_foreign = not is_ours(Path(frame[1]), self._root)
        elif not line.startswith("    "):
            self._is_foreign = False
        if level := LEVEL.match(line):
            self._is_loud = level[1] in LOUD
        is_shown = self._is_loud and not (self._is_foreign or JVM_FRAME.match(line) or line.startswith(NOISE))
        if line.strip() and (self._verbose or is_shown):
            yield line.replace(f"{self._root}/", "")

    def _of_record(self, record: dict[str, object]) -> Iterator[str]:
        fields = (f"{name}={_first(value)}" for name, value in record.items() if name not in LEFT_OUT)
        yield " ".join([str(record["level"]).upper(), _first(record["event"]), *fields])
        yield from Shown(self._root).lines(str(record.get("exception", "")).splitlines())


def is_ours(file: Path, root: Path) -> bool:
    """Whether a file is one of the project."""
    return file.is_relative_to(root) and not {".venv", "site-packages", "machinery"} & {*file.relative_to(root).parts}


def _record(line: str) -> dict[str, object] | None:
    """The record of our own log that a line is; None for other lines."""
    if not line.startswith("{"):
        return None
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and {"level", "event"} <= found.keys() else None


def _first(value: object) -> str:
    """The first line of a value."""
    return next(iter(str(value).strip().splitlines()), "")
