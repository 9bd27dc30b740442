"""Processes that a stack may have left behind."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import psutil


def leftovers(home: Path) -> list[str]:
    """Whatever lives and has to do with a home: by its command line, its folder or its environment, not by our mark."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            words = [*process.cmdline(), process.cwd(), *process.environ().values()]
            if process.status() != psutil.STATUS_ZOMBIE and any(str(home) in word for word in words):
                found.append(f"{process.pid} {' '.join(process.cmdline())[:200]}")
    return found
