"""A finding: the cases that contradict one promise."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

SHOWN = 5


class Finding(NamedTuple):
    """A promise that does not hold, how often, and the first cases."""

    promise: str
    cases: int
    examples: Sequence[str]

    def __str__(self) -> str:
        more = f" and {self.cases - len(self.examples)} more" if self.cases > len(self.examples) else ""
        return f"{self.promise}: {'; '.join(self.examples)}{more}"


def findings(promise: str, cases: Iterable[str]) -> list[Finding]:
    """One finding of all cases; an empty list without a case."""
    found = sorted(cases)
    return [Finding(promise, len(found), found[:SHOWN])] if found else []
