"""Content of a page for readers: blocks, each below a paragraph, and words in backquotes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import NamedTuple

BLOCK = re.compile(r"(?P<paragraph>(?:^\S.*\n)+)\n(?P<block>^ {4}.*\n(?:(?: {4}.*)?\n)*)", re.MULTILINE)
FILE = re.compile(r"`(?P<path>[\w./-]+)`:")
QUOTED = re.compile(r"`([^`]+)`")
LEFT_OUT = "…"


class Excerpt(NamedTuple):
    """A part of a file, as a page shows it."""

    path: str
    text: str

    def is_in(self, file: Path) -> bool:
        """Whether each run of lines is in the file word for word, in this order; all may be indented less."""
        lines = file.read_text().splitlines()
        for part in re.split(rf"^\s*{LEFT_OUT}\n", self.text, flags=re.MULTILINE):
            wanted = dedent(part).rstrip("\n").splitlines()
            ends = (
                number + len(wanted)
                for number in range(len(lines) - len(wanted) + 1)
                if dedent("\n".join(lines[number : number + len(wanted)])).splitlines() == wanted
            )
            end = next(ends, None)
            if end is None:
                return False
            lines = lines[end:]
        return True


def excerpts(page: str) -> Iterator[Excerpt]:
    """The blocks of a page that are parts of a file, which the paragraph before names."""
    for found in BLOCK.finditer(page):
        if named := FILE.fullmatch(found["paragraph"].rstrip("\n")):
            yield Excerpt(named["path"], dedent(found["block"]).strip("\n") + "\n")


def commands(page: str) -> list[str]:
    """The blocks that are commands, and the texts in backquotes; each on one line."""
    blocks = [
        line
        for found in BLOCK.finditer(page)
        if not FILE.fullmatch(found["paragraph"].rstrip("\n"))
        for line in dedent(found["block"]).splitlines()
    ]
    prose = re.sub(r"(?m)^ {4}.*\n", "", page)
    return [*blocks, *(" ".join(text.split()) for text in QUOTED.findall(prose))]


def block(page: str, beginning: str) -> str:
    """The one block that begins so."""
    (found,) = [text for one in BLOCK.finditer(page) if (text := dedent(one["block"])).startswith(beginning)]
    return found
