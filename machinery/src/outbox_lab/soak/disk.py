"""A disk for the data of one part, which can be full: a file system in memory (tmpfs), in the run's mount namespace.

Only the run and its processes see what is mounted in that namespace, and all of it is gone when the last of them has
ended, however it ended.

Linux lets root enter one. Other users need a user namespace with it, which a host or a container may forbid. They keep
their id there, and only this process may mount. A process with several threads cannot enter a user namespace, and NumPy
starts some when it is imported. So the command replaces itself by one that enters first.
"""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from outbox.base.wait import wait_for

NEW_MOUNTS, NEW_USER = 0x00020000, 0x10000000  # CLONE_NEWNS, CLONE_NEWUSER
RECURSIVE, PRIVATE = 1 << 14, 1 << 18  # MS_REC, MS_PRIVATE
REMOUNT = 1 << 5  # MS_REMOUNT
FLAGS = 0b110  # MS_NOSUID, MS_NODEV
ROOM = "size=50%"  # of the memory, of which a disk takes only what the part writes
KIB = 1 << 10
TRY = "import sys; from outbox_lab.soak import disk; disk.enter_namespace(); disk.Disk(sys.argv[1]).mount()"
RUN = "from outbox_lab.soak import disk; disk.enter_namespace(); from outbox import cli; cli.main()"
_entered: list[bool] = []


class Disk:
    """The file system that is mounted on a folder."""

    def __init__(self, folder: Path | str) -> None:
        self._folder = Path(folder)

    def mount(self) -> None:
        """Mount it on the empty folder. Raises OSError outside a namespace of ours."""
        self._folder.mkdir(parents=True, exist_ok=True)
        _mount(self._folder, FLAGS, f"{ROOM},mode=755")

    def fill(self) -> None:
        """Leave no room. The room of a file that is deleted later is free again: then fill it again.

        A file that takes the room would take it from the memory. So the disk shrinks to what it has, with the same
        effect: the next block that a program asks for is refused with ENOSPC.
        """

        def is_full() -> bool:
            try:
                _mount(self._folder, REMOUNT | FLAGS, f"size={max(self.used_bytes, 1)}")
            except OSError as error:
                if error.errno == errno.EINVAL:  # somebody has written meanwhile
                    return False
                raise
            return True

        wait_for(f"{self._folder} to be full", is_full, timeout_s=30, poll_s=0.01)

    def free(self) -> None:
        """Give it room again."""
        _mount(self._folder, REMOUNT | FLAGS, ROOM)

    @property
    def used_bytes(self) -> int:
        found = os.statvfs(self._folder)
        return (found.f_blocks - found.f_bfree) * found.f_frsize


def is_entered() -> bool:
    """Whether this process has entered a namespace."""
    return bool(_entered)


def why_impossible() -> str:
    """Why a process cannot mount in a namespace of its own; empty if it can, which another process tries."""
    if sys.platform != "linux":
        return "only Linux has mount namespaces"
    with tempfile.TemporaryDirectory() as folder:
        tried = subprocess.run([sys.executable, "-c", TRY, folder], capture_output=True, text=True, check=False)
    lines = tried.stderr.strip().splitlines() or [f"status {tried.returncode}"]
    return lines[-1] if tried.returncode else ""


def restart_in_namespace() -> None:
    """Replace this process by the same command in a namespace. Returns never."""
    os.execv(sys.executable, [sys.executable, "-c", RUN, *sys.argv[1:]])  # noqa: S606


def enter_namespace() -> None:
    """Enter a namespace for good. Raises OSError if that is forbidden."""
    user, group = os.geteuid(), os.getegid()
    _call("unshare", NEW_MOUNTS if user == 0 else NEW_MOUNTS | NEW_USER)
    if user != 0:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    _call("mount", None, b"/", None, RECURSIVE | PRIVATE, None)  # else the host may see our mounts
    _entered.append(True)


def _mount(folder: Path, flags: int, options: str) -> None:
    if not is_entered():
        raise OSError(errno.EPERM, "this process is not in a mount namespace of its own")
    _call("mount", b"tmpfs", os.fsencode(folder), b"tmpfs", flags, options.encode())


def _call(name: str, *arguments: object) -> None:
    """Call a function of the C library that returns 0, or -1 and sets `errno`."""
    library = ctypes.CDLL(None, use_errno=True)
    converted = [ctypes.c_ulong(one) if isinstance(one, int) else one for one in arguments]
    if getattr(library, name)(*converted) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
