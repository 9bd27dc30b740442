"""Who plays the story, and where it is shown: by default the terminal alone.

A project may name a `Player` that shows it elsewhere too.
"""

from __future__ import annotations

import importlib
import signal
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from outbox.base import project
from outbox.base.errors import Failure

if TYPE_CHECKING:
    from outbox_lab.walkthrough.story import Story  # it imports the screen


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


class Player:
    """Plays the story on the terminal. ``player`` in ``[tool.outbox]`` names a subclass, as ``module:class``.

    One object plays one run of `outbox demo`; it is made without arguments. Whatever it shows elsewhere, the exit
    status of the command is decided by its ``screen``: the first expectation that did not hold.
    """

    def __init__(self) -> None:
        self.screen = Screen()

    def play(self, story: Story) -> None:
        """Play all steps, and return after the last."""
        story.play()

    def wait(self) -> None:
        """Called after the story unless it is played once: return when the user has seen enough. Ctrl-C interrupts."""
        signal.pause()

    def close(self) -> None:
        """Called once at the end, also after a failure, while the chain still runs: end what this player started."""


def load() -> Player:
    """The project's player; the terminal's, which says so, if the folder of the named one was deleted.

    Raises Failure if a player is named that cannot be made.
    """
    named = project.current().player
    if not named:
        return Player()
    module, _, attribute = named.partition(":")
    try:
        player: Player = getattr(importlib.import_module(module), attribute)()
    except (ImportError, AttributeError, ValueError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{module}.".startswith(f"{error.name}."):
            player = Player()
            player.screen.say(f"there is no module {module}: the walkthrough is shown on the terminal only")
            return player
        raise Failure(
            f"the walkthrough found no player {named}: {error}",
            "write that class, or remove `player` from [tool.outbox] of pyproject.toml",
            code="player-missing",
        ) from error
    return player
