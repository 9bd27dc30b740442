"""Home folders of the stacks of one test run. No stack outlives the run that started it.

Each process that runs tests has one folder below `.outbox/tests`, and holds a lock on the file `owner` in it. The
system releases the lock when the process ends, however it ends. Then these stop what runs below the folder:

- the fixtures, at the regular end and after Ctrl-C;
- a watchdog (`python -m outbox_lab.testing.homes FOLDER`), which waits for the lock;
- the next run that starts a stack, and `outbox down`, if the watchdog was killed too.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import uuid
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO

from outbox.base import project

VARIABLE = "TEST_HOMES"  # names another folder
OWNER = "owner"


def all_homes() -> Path:
    """Where all runs have their folders."""
    named = os.environ.get(VARIABLE)
    return Path(named) if named else project.current().home / "tests"


class Homes:
    """The folder of this process, from its first use to ``close``."""

    def __init__(self, root: Path | None = None) -> None:
        root = (root or all_homes()).resolve()  # as the homes of settings are
        sweep(root)
        self.folder = root / uuid.uuid4().hex[:8]
        self.folder.mkdir(mode=0o700, parents=True)
        # Locked before it has its name: another run that sweeps meanwhile must not take it for a dead one's.
        unnamed = self.folder / f"{OWNER}.new"
        self._owner = unnamed.open("x")
        fcntl.flock(self._owner, fcntl.LOCK_EX)
        unnamed.rename(self.folder / OWNER)
        watchdog = subprocess.Popen(
            [sys.executable, "-m", __name__, self.folder],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in the terminal must not end it
        )
        watchdog.returncode = 0  # it outlives this process; nobody waits for it

    def new(self, name: str) -> Path:
        """A new home folder. Its name has a space and an `ö`: the paths of users have such characters."""
        home = self.folder / f"{name} ö {uuid.uuid4().hex[:8]}"
        home.mkdir()
        return home

    def close(self, *, keep_logs: bool) -> None:
        """Stop everything below the folder and delete it; logs may stay until the next run."""
        end(self.folder, keep_logs=keep_logs)
        self._owner.close()


def end(folder: Path, *, keep_logs: bool) -> None:
    """Stop everything below the folder, and delete the folder, or all of it but the logs."""
    from outbox.base.settings import load  # the watchdog waits without the machinery in its memory
    from outbox_lab.stack.stack import Stack

    Stack(load(folder, environment=False)).down(gently=False)
    if not keep_logs:
        shutil.rmtree(folder, ignore_errors=True)
    for path in folder.glob("*/*"):
        if path.is_file():
            path.unlink()
        elif path.name != "logs":
            shutil.rmtree(path, ignore_errors=True)


def sweep(root: Path) -> None:
    """End the folders of all runs that are dead, with their logs."""
    for file in root.glob(f"*/{OWNER}"):
        with ExitStack() as files:
            owner = _lock(files, file, fcntl.LOCK_NB)
            if owner is not None:
                end(file.parent, keep_logs=False)


def leftovers(home: Path) -> list[str]:
    """Whatever lives and has to do with a home: by its command line, its folder or its environment, not by our mark."""
    import psutil  # the watchdog waits without it

    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            words = [*process.cmdline(), process.cwd(), *process.environ().values()]
            if process.status() != psutil.STATUS_ZOMBIE and any(str(home) in word for word in words):
                found.append(f"{process.pid} {' '.join(process.cmdline())[:200]}")
    return found


def watch(folder: Path) -> None:
    """Wait until the owner of the folder is dead, then end the folder unless that is done."""
    with ExitStack() as files:
        owner = _lock(files, folder / OWNER)
        if owner is not None and (folder / OWNER).exists():
            end(folder, keep_logs=True)


def _lock(files: ExitStack, file: Path, options: int = 0) -> IO[str] | None:
    """The locked file; None if it does not exist, or if another process has the lock and we do not wait."""
    try:
        owner = files.enter_context(file.open())
        fcntl.flock(owner, fcntl.LOCK_EX | options)
    except (FileNotFoundError, BlockingIOError):
        return None
    return owner


if __name__ == "__main__":
    watch(Path(sys.argv[1]))
