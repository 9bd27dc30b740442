"""A mount namespace for the run: only the run and its processes see what is mounted in it, and all of that is gone when
the last of them has ended, however it ended.

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

NEW_MOUNTS, NEW_USER = 0x00020000, 0x10000000  # CLONE_NEWNS, CLONE_NEWUSER
RECURSIVE, PRIVATE = 1 << 14, 1 << 18  # MS_REC, MS_PRIVATE
TRY = "import sys; from outbox_lab.soak import namespace; namespace.attempt(sys.argv[1])"
RUN = "from outbox_lab.soak import namespace; namespace.enter(); from outbox import cli; cli.main()"
_entered: list[bool] = []


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


def restart_in_one() -> None:
    """Replace this process by the same command in a namespace. Returns never."""
    os.execv(sys.executable, [sys.executable, "-c", RUN, *sys.argv[1:]])  # noqa: S606


def attempt(folder: str) -> None:
    """Enter a namespace, and mount something in it."""
    enter()
    mount("tmpfs", Path(folder))


def enter() -> None:
    """Enter a namespace for good. Raises OSError if that is forbidden."""
    user, group = os.geteuid(), os.getegid()
    _call("unshare", NEW_MOUNTS if user == 0 else NEW_MOUNTS | NEW_USER)
    if user != 0:
        _write("setgroups", "deny")
        _write("uid_map", f"{user} {user} 1")
        _write("gid_map", f"{group} {group} 1")
    _call("mount", None, b"/", None, RECURSIVE | PRIVATE, None)  # else the host may see our mounts
    _entered.append(True)


def mount(kind: str, folder: Path, flags: int = 0, options: str = "") -> None:
    """Mount a file system of this kind on a folder. Raises OSError, also outside a namespace of ours."""
    if not is_entered():
        raise OSError(errno.EPERM, "this process is not in a mount namespace of its own")
    _call("mount", kind.encode(), os.fsencode(folder), kind.encode(), flags, options.encode())


def _write(name: str, text: str) -> None:
    Path("/proc/self", name).write_text(text)


def _call(name: str, *arguments: object) -> None:
    """Call a function of the C library that returns 0, or -1 and sets `errno`."""
    library = ctypes.CDLL(None, use_errno=True)
    converted = [ctypes.c_ulong(one) if isinstance(one, int) else one for one in arguments]
    if getattr(library, name)(*converted) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
