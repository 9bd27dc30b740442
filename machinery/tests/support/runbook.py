"""The runbook, entry by entry: rehearsals take their commands from the page, so that the page cannot differ."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "runbook.md"
PARTS = ("You see", "Doctor", "Do", "Afterwards", "Rehearsed")
PART = re.compile(r"^- \*\*(.+?):\*\* ", re.MULTILINE)
CODE = re.compile(r"`([^`]+)`")
BLOCK = re.compile(r"^ *```sh\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
TEST = re.compile(r"`(tests/[\w/]+\.py(?:::\w+)*)`")


@dataclass(frozen=True)
class Entry:
    """An entry of the runbook: a heading, and the text of each part."""

    title: str
    parts: Mapping[str, str]

    @property
    def codes(self) -> Sequence[str]:
        """The codes that `outbox doctor` prints, in the order of the page."""
        return [code for code in CODE.findall(self.parts["Doctor"]) if " " not in code]

    @property
    def commands(self) -> Sequence[Sequence[str]]:
        """The commands of the block, in order, each as words without `outbox`."""
        lines = [line.strip() for block in BLOCK.findall(self.parts["Do"]) for line in block.splitlines()]
        return [shlex.split(line)[1:] for line in lines]

    @property
    def mentioned(self) -> Sequence[Sequence[str]]:
        """Every command of the entry, those in sentences too."""
        inline = [code for text in self.parts.values() for code in CODE.findall(BLOCK.sub("", text))]
        return [*self.commands, *(shlex.split(code)[1:] for code in inline if code.startswith("outbox "))]

    @property
    def rehearsals(self) -> Sequence[str]:
        """The ids of the tests that rehearse it."""
        return TEST.findall(self.parts["Rehearsed"])


@cache
def entries() -> Mapping[str, Entry]:
    _, *sections = re.split(r"^### (.+)\n", PAGE.read_text(), flags=re.MULTILINE)
    return {title: Entry(title, _parts(text)) for title, text in zip(sections[::2], sections[1::2], strict=True)}


def entry(title: str) -> Entry:
    return entries()[title]


def _parts(text: str) -> Mapping[str, str]:
    text = text.partition("\n## ")[0]
    _, *found = PART.split(text)
    return dict(zip(found[::2], found[1::2], strict=True))
