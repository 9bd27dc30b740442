"""The failures we expect: told in one clear line, with what to do next."""

from __future__ import annotations


class Failure(Exception):
    """An expected failure. The command line prints it as one line on stderr and exits with status 1.

    ``remedy`` says what to do next; it is appended to the message.
    """

    def __init__(self, message: str, remedy: str | None = None) -> None:
        super().__init__(f"{message} — {remedy}" if remedy else message)
        self.remedy = remedy
