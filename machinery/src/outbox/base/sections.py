"""Sections of a SQL file: ``-- [name]`` on a line of its own begins one."""

from __future__ import annotations

import re
from pathlib import Path

from outbox.base.errors import Failure

MARKER = re.compile(r"^[ \t]*--[ \t]*\[.*$", re.MULTILINE)  # every line that is, or looks like, the begin of a section
SECTION = re.compile(r"^-- \[(\w+)\][ \t]*$", re.MULTILINE)
COMMENT = re.compile(r"--[^\n]*|/\*.*?\*/", re.DOTALL)


def sql_sections(file: Path, *names: str) -> dict[str, str]:
    """The sections of a file by name. A file without sections is all ``names[0]``.

    Raises Failure for a section that is not among ``names``, for a line that only looks like the begin of a section,
    for a section that comes twice, for SQL before the first section, and if there are sections but the first of
    ``names`` is missing.
    """
    text = file.read_text()
    begin, *rest = SECTION.split(text)
    found = rest[::2]
    lines = [line.strip() for line in MARKER.findall(text)]
    if not lines:
        return {names[0]: text}
    if len(lines) > len(found) or set(found) - set(names) or names[0] not in found or len(set(found)) < len(found):
        raise Failure(
            f"{file}: sections are {', '.join(f'`{line}`' for line in lines)}",
            f"there are {', '.join(f'`-- [{name}]`' for name in names)}, each once; the first is required",
            code="sql-section-unknown",
        )
    if COMMENT.sub("", begin).strip():
        raise Failure(
            f"{file}: there is SQL before its first section, `{lines[0]}`",
            "move it into a section; only comments may come before the first",
            code="sql-section-unknown",
        )
    return dict(zip(found, rest[1::2], strict=True))
