"""A mutation: one text of one file that is replaced, and the tests of which one must fail then."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import cache_from_source
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Mutation:
    """A mistake that somebody could make. ``tests`` are node ids, from the folder ``suite`` of the repository."""

    name: str
    file: str
    old: str
    new: str
    tests: Sequence[str]
    suite: str = "machinery"

    def of(self, text: str) -> str:
        """The file's text with the mutation. Raises ValueError unless it has the old text exactly once."""
        found = text.count(self.old) if self.old else 0
        if found != 1:
            raise ValueError(f"mutation {self.name!r}: {self.file} has its text {found} times, not once")
        return text.replace(self.old, self.new)

    @contextmanager
    def applied(self, root: Path) -> Iterator[None]:
        """Change the file in a copy of the repository, until the end of the block."""
        file = root / self.file
        before = file.read_text()
        _replace(file, self.of(before))
        try:
            yield
        finally:
            _replace(file, before)


def every(folder: Path = Path(__file__).parent) -> list[Mutation]:
    """All mutations, in the order of their files."""
    return [
        Mutation(**one) for file in sorted(folder.glob("*.toml")) for one in tomllib.loads(file.read_text())["mutation"]
    ]


def chosen(names: Sequence[str]) -> list[Mutation]:
    """Mutations whose names are, or contain, one of these texts; without texts, all.

    Raises ValueError for a text that no name contains.
    """
    known = every()
    wanted = set[str]() if names else {one.name for one in known}
    for name in names:
        alike = {one.name for one in known if name in one.name}
        if not alike:
            raise ValueError(f"no mutation has {name!r} in its name")
        wanted |= {name} if name in alike else alike
    return [one for one in known if one.name in wanted]


def _replace(file: Path, text: str) -> None:
    """Write a file again. Python must compile it again: it compares the size, and the time in whole seconds."""
    file.write_text(text)
    Path(cache_from_source(str(file))).unlink(missing_ok=True)
