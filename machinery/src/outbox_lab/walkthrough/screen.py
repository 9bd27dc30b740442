"""The output for people: headings, facts, expectations that held or not, a table."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence


class Screen:
    """Writes to standard output. Remembers the first expectation that did not hold."""

    def __init__(self) -> None:
        self._started_at = time.monotonic()
        self._color = sys.stdout.isatty()
        self.failed: str | None = None

    def title(self, text: str) -> None:
        """A new step of the story."""
        self._line("")
        self._line(self._paint("1", f"[{time.monotonic() - self._started_at:5.1f} s] {text}"))

    def say(self, text: str) -> None:
        """A fact: what happens, or why."""
        for line in text.splitlines():
            self._line(f"    {line}")

    def progress(self, text: str) -> None:
        """A step of long work."""
        self._line(self._paint("2", f"      · {text}"))

    def expect(self, held: bool, claim: str, found: str) -> None:
        """An expectation: shown with what was found, and remembered if it did not hold."""
        mark = self._paint("32", "✔") if held else self._paint("31", "✘")
        self._line(f"    {mark} {claim}: {found}")
        if not held and self.failed is None:
            self.failed = f"{claim}: {found}"

    def table(self, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """A table: the first column is left-aligned, the numbers are right-aligned."""
        cells = [[str(cell) for cell in row] for row in (header, *rows)]
        widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
        for number, row in enumerate(cells):
            first, *others = (
                cell.ljust(width) if column == 0 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            self._line("    " + "   ".join([first, *others]))
            if number == 0:
                self._line("    " + "   ".join("─" * width for width in widths))

    def _paint(self, code: str, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self._color else text

    def _line(self, text: str) -> None:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
