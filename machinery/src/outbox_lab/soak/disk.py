"""A disk for the data of one part, which can be full. It is a file system in memory (tmpfs), in the run's namespace."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from outbox.base.wait import wait_for
from outbox_lab.soak import namespace

REMOUNT = 1 << 5  # MS_REMOUNT
FLAGS = 0b110  # MS_NOSUID, MS_NODEV
ROOM = "size=50%"  # of the memory, of which it takes only what the part writes
KIB = 1 << 10


class Disk:
    """The file system that is mounted on a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def mount(self) -> None:
        """Mount it on the empty folder. Raises OSError outside a namespace of ours."""
        self._folder.mkdir(parents=True, exist_ok=True)
        namespace.mount("tmpfs", self._folder, FLAGS, f"{ROOM},mode=755")

    def fill(self) -> None:
        """Leave no room. The room of a file that is deleted later is free again: then fill it again.

        A file that takes the room would take it from the memory. So the disk shrinks to what it has, with the same
        effect: the next block that a program asks for is refused with ENOSPC.
        """

        def is_full() -> bool:
            try:
                self._remount(f"size={max(self.used_bytes, 1)}")
            except OSError as error:
                if error.errno == errno.EINVAL:  # somebody has written meanwhile
                    return False
                raise
            return True

        wait_for(f"{self._folder} to be full", is_full, timeout_s=30, poll_s=0.01)

    def free(self) -> None:
        """Give it room again."""
        self._remount(ROOM)

    @property
    def used_bytes(self) -> int:
        """What it has."""
        found = os.statvfs(self._folder)
        return (found.f_blocks - found.f_bfree) * found.f_frsize

    def _remount(self, options: str) -> None:
        namespace.mount("tmpfs", self._folder, REMOUNT | FLAGS, options)
