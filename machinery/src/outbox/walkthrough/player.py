"""Who plays the story: by default the terminal alone. A project may name a subclass that shows it elsewhere too."""

from __future__ import annotations

import importlib
import signal

from outbox.base import project
from outbox.base.errors import Failure
from outbox.walkthrough.screen import Screen
from outbox.walkthrough.story import Story


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
    """The project's player. Raises Failure if the project names one that is not there."""
    named = project.current().player
    module, _, attribute = named.partition(":")
    try:
        player: Player = getattr(importlib.import_module(module), attribute)()
    except (ImportError, AttributeError, ValueError) as error:
        raise Failure(
            f"the walkthrough found no player {named}: {error}",
            "write that class, or remove `player` from [tool.outbox] of pyproject.toml",
            code="player-missing",
        ) from error
    return player
