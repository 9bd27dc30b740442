"""`copier`, for tests that make many projects: each text is compiled once.

Jinja compiles the path of every file of the template again and again: thousands of texts, half the work of a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import redirect_stderr
from functools import cache
from io import StringIO
from typing import Any

from copier.__main__ import CopierApp  # type: ignore[attr-defined]
from jinja2 import Environment, Template

from_string = Environment.from_string


@cache
def compiled(environment: Environment, source: str) -> Template:
    """The template of a text, which an environment compiles once."""
    return from_string(environment, source)


def from_string_once(self: Environment, source: str, *others: Any, **named: Any) -> Template:
    """In the place of ``Environment.from_string``."""
    return from_string(self, source, *others, **named) if others or named else compiled(self, source)


def run(words: Sequence[str]) -> tuple[int, str]:
    """Run copier with these words in this process; its exit status, and the error that it ends with."""
    with redirect_stderr(StringIO()) as errors:
        try:
            _, status = CopierApp.run(["copier", *words], exit=False)
        except ValueError as error:  # what it refuses is no failure to it: a process would end with a traceback
            return 1, str(error)
    return status, errors.getvalue()


Environment.from_string = from_string_once  # type: ignore[method-assign, assignment]

if __name__ == "__main__":
    CopierApp.run()
