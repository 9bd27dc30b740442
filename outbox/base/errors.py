"""The failures we expect: told in one clear line, with what to do next."""

from __future__ import annotations


class Failure(Exception):
    """An expected failure. The command line prints it as one line on stderr and exits with status 1.

    ``message`` says what failed, ``remedy`` what to do next; as text it is both.
    """

    def __init__(self, message: str, remedy: str | None = None) -> None:
        super().__init__(f"{message} — {remedy}" if remedy else message)
        self.message = message
        self.remedy = remedy
