"""The failures we expect, reported in one clear line that says what to do next."""

from __future__ import annotations

import re

KIND = re.compile(r"\[[\w.]+\]|[\w.]+(?=:)")  # as Spark writes the class of an error, or as Python and Java do


class Failure(Exception):
    """An expected failure. The command line prints it as one line on stderr and exits with status 1.

    ``message`` says what failed, ``remedy`` what to do next; as text it is both. ``code`` is a stable word for scripts
    and tests, such as ``sink-fenced``; the wording of the other two may change.
    """

    def __init__(self, message: str, remedy: str | None = None, *, code: str = "failed") -> None:
        super().__init__(f"{message} — {remedy}" if remedy else message)
        self.code = code
        self.message = message
        self.remedy = remedy


def kind_of(said: str) -> str:
    """The class at the beginning of an error's text, whose rest may repeat a value."""
    found = KIND.match(said)
    return found[0] if found else "an error"


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
