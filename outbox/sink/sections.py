"""Sections of a SQL file: ``-- [name]`` on a line of its own begins one."""

from __future__ import annotations

import re
from pathlib import Path

from outbox.base.errors import Failure

SECTION = re.compile(r"^-- \[(\w+)\]$", re.MULTILINE)


def sql_sections(file: Path, *names: str) -> dict[str, str]:
    """The sections of a file by name. A file without sections is all ``names[0]``.

    Raises Failure for a section that is not among ``names``, for one that comes twice, and if there are sections but
    the first of ``names`` is missing.
    """
    text = file.read_text()
    _, *rest = SECTION.split(text)
    found = rest[::2]
    if not found:
        return {names[0]: text}
    if set(found) - set(names) or names[0] not in found or len(set(found)) < len(found):
        raise Failure(
            f"{file}: sections are {', '.join(found)}",
            f"there are {', '.join(f'`-- [{name}]`' for name in names)}, each once; the first is required",
            code="sql-section-unknown",
        )
    return dict(zip(found, rest[1::2], strict=True))
