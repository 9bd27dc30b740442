"""A part's log as `outbox dev` shows it: what the project prints, warnings, and errors in a few lines.

An error has the frames of the project, and its cause. Values of variables are left out: they may be anybody's data.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

QUIET = ("debug", "info")
# Levels of the servers' lines, as log4j2.properties and Postgres write them; a STATEMENT or DETAIL has values.
LEVEL = re.compile(
    r"^\d{4}-\d\d-\d\d[ T][\d:.,]+ .*?\b"
    r"(TRACE|DEBUG\d?|INFO|LOG|NOTICE|WARN|WARNING|ERROR|FATAL|PANIC|DETAIL|HINT|QUERY|CONTEXT|STATEMENT)\b:? "
)
LOUD = ("WARN", "WARNING", "ERROR", "FATAL", "PANIC")
BEGIN = "Traceback (most recent call last):"
LINK = re.compile(r"\n\n(?:The above exception was|During handling of the above).*\n\n")
FRAME = re.compile(r'^ +File "(.+?)", line \d+.*$')
JVM_FRAME = re.compile(r"^\s+(at |\.\.\. \d+ more)")
# Each start of Spark prints these.
NOISE = ("NOTE: Picked up ", "WARNING: Using incubator modules", "Setting default log level", "To adjust logging level")
FRAMES_MAX = 3  # of each error of a chain: with its first and its last one, 20 lines
LEFT_OUT = ("timestamp", "level", "event", "exception", "logger")


class Shown:
    """Lines of one log, as they are shown. ``root`` is the project's folder."""

    def __init__(self, root: Path, *, verbose: bool = False) -> None:
        self._root, self._verbose = root, verbose
        self._traceback: list[str] = []  # of a plain one that may not be complete
        self._is_loud = True  # whether the last line with a level was shown: those below belong to it

    def lines(self, logged: Sequence[str]) -> Iterator[str]:
        """Show what a log has got since the last call."""
        for line in logged:
            if self._traceback or line == BEGIN:
                if not self._ends(line):
                    self._traceback.append(line)
                    continue
                yield from self._error()
            yield from self._line(line)
        if self._traceback and not self._traceback[-1].startswith(" ") and self._traceback[-1] not in ("", BEGIN):
            yield from self._error()

    def _ends(self, line: str) -> bool:
        """Whether a line no longer belongs to the traceback before it."""
        last = self._traceback[-1] if self._traceback else ""
        is_complete = len(self._traceback) > 1 and not last.startswith(" ")
        return is_complete and last != "" and line != "" and not LINK.match(f"\n\n{last}\n\n")

    def _error(self) -> Iterator[str]:
        yield from shortened("\n".join(self._traceback), self._root)
        self._traceback.clear()

    def _line(self, line: str) -> Iterator[str]:
        record = _record(line)
        if record is not None:
            self._is_loud = True
            if self._verbose or record["level"] not in QUIET:
                yield from self._of_record(record)
            return
        if level := LEVEL.match(line):
            self._is_loud = self._verbose or level[1] in LOUD
        is_shown = self._is_loud and not JVM_FRAME.match(line) and not line.startswith(NOISE)
        if line.strip() and (self._verbose or is_shown):
            yield line

    def _of_record(self, record: dict[str, object]) -> Iterator[str]:
        fields = (f"{name}={_first(value)}" for name, value in record.items() if name not in LEFT_OUT)
        yield " ".join([str(record["level"]).upper(), _first(record["event"]), *fields])
        if "exception" in record:
            yield from shortened(str(record["exception"]), self._root)


def shortened(traceback: str, root: Path) -> list[str]:
    """A traceback's first error, which is the cause, and its last one, each with its frames in the project."""
    chain = LINK.split(traceback)
    if len(chain) == 1:
        return [*_of_error(chain[0], root)]
    return [*_of_error(chain[0], root), "… which led to:", *_of_error(chain[-1], root)]


def _of_error(text: str, root: Path) -> Iterator[str]:
    """The last frames of the project, or else the very last one, and the first line of the message.

    Further lines may have values, such as the parameters of a statement.
    """
    lines = text.splitlines()
    found = [number for number, line in enumerate(lines) if FRAME.match(line)]
    ours = [number for number in found if _is_ours(lines[number], root)]
    for number in (ours or found[-1:])[-FRAMES_MAX:]:
        yield lines[number].replace(f"{root}/", "")
        if number + 1 < len(lines) and lines[number + 1].startswith("    "):
            yield lines[number + 1]
    yield next((line for line in lines if not line.startswith(" ") and line != BEGIN), "")


def _is_ours(frame: str, root: Path) -> bool:
    """Whether a frame is in a file of the project."""
    match = FRAME.match(frame)
    path = Path(match[1]) if match else root
    return path.is_relative_to(root) and not {".venv", "site-packages", "machinery"} & {*path.relative_to(root).parts}


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
    lines: Iterable[str] = str(value).strip().splitlines()
    return next(iter(lines), "")
