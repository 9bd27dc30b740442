"""Text on a terminal. Foreign text, such as a record's key, may hold sequences that would control the terminal."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, TextIO, cast

Progress = Callable[[str], None]
"""Takes a line that says how far long work has come."""

# Colours, bold and dim are ours. Every other control character is shown, and so is what reverses the direction of text.
_STYLE = r"\x1b\[(?:[012]|[39][1-7])?m"
_CONTROL = re.compile(rf"(?P<style>{_STYLE})|[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    """The text with its control characters written out, as ``\\x1b``; lines, tabs and colours stay."""
    return _CONTROL.sub(lambda found: found["style"] or found[0].encode("unicode_escape").decode(), text)


class Visible:
    """A text stream that shows control characters instead of sending them."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        return self._stream.write(visible(text))

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)


def sparse(report: Progress, every_s: float) -> Progress:
    """Report a line now and then, and drop the others."""
    next_s = time.monotonic() + every_s

    def one(line: str) -> None:
        nonlocal next_s
        if time.monotonic() >= next_s:
            next_s = time.monotonic() + every_s
            report(line)

    return one


def guarded(stream: TextIO) -> TextIO:
    """The stream as one that controls no terminal."""
    return stream if isinstance(stream, Visible) else cast(TextIO, Visible(stream))


def guard() -> None:
    """Let nothing that this process prints control a terminal."""
    sys.stdout, sys.stderr = guarded(sys.stdout), guarded(sys.stderr)
