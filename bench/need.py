"""Condition of a wait, asked so rarely that the measurement does not feel it."""

from __future__ import annotations

import time
from collections.abc import Callable

EVERY_S = 1.0


def rarely(need: Callable[[], None]) -> Callable[[], None]:
    """The need, asked a second after this call for the first time, and then once a second.

    To find a process takes some milliseconds of a core, which is more than some of the times that are measured.
    """
    due_s = time.monotonic() + EVERY_S

    def ask() -> None:
        nonlocal due_s
        if time.monotonic() >= due_s:
            need()
            due_s = time.monotonic() + EVERY_S

    return ask
