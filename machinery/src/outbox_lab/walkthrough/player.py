"""Who plays the story: by default the terminal alone. A project may name a subclass that shows it elsewhere too."""

from __future__ import annotations

import importlib
import signal

from outbox.base import project
from outbox.base.errors import Failure
from outbox_lab.walkthrough.story import Screen, Story


class Player:
    """Plays the story on the terminal. ``player`` in ``[tool.outbox]`` names a subclass, as ``module:class``.

    One object plays one run of `outbox demo`; it is made without arguments. Whatever it shows elsewhere, the exit
    status of the command is decided by its ``screen``: the first expectation that did not hold. ``page`` is the host
    and port for a player that serves a page. A free port takes the place of a taken one.
    """

    page = ("127.0.0.1", 8090)

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
