"""Archives of loaded classes (class-data sharing). With one, a JVM starts with half the work.

`python -m outbox_lab.stack.archives` records them, once per virtual environment. An archive belongs to one Java and one
class path: its name contains a hash of both. A JVM that cannot use an archive starts without it.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from outbox.jvm.java import java

VARIABLE = "OUTBOX_JVM_ARCHIVES"  # "record": write them when a JVM exits; "off": do not use them
# The first bytes of an archive. Java writes them last, so a file that begins with them is complete.
MAGIC = 0xF00BABA8.to_bytes(4, sys.byteorder)


def options(name: str, jars: Sequence[Path]) -> list[str]:
    """The options of a JVM with these jars in its class path; none if there is no archive for it."""
    file = path(name, jars)
    match os.environ.get(VARIABLE):
        case "off":
            return []
        case "record":
            file.parent.mkdir(parents=True, exist_ok=True)
            return [f"-XX:ArchiveClassesAtExit={_recording(file)}"]
    # The warning of an archive that does not fit would confuse: the JVM works without it.
    return [f"-XX:SharedArchiveFile={file}", "-Xlog:cds*=off"] if file.exists() else []


def install(name: str, jars: Sequence[Path]) -> bool:
    """Put a recorded archive in its place, once the JVM that recorded it has exited; False if it is not complete."""
    file = path(name, jars)
    if not _is_complete(_recording(file)):
        return False
    for other in file.parent.glob(f"{name}-*.jsa"):
        other.unlink()
    _recording(file).replace(file)
    return True


def path(name: str, jars: Sequence[Path]) -> Path:
    """The file of an archive, which need not exist."""
    program = java().resolve()
    files = [f"{file}:{file.stat().st_size}:{file.stat().st_mtime_ns}" for file in (program, *jars)]
    key = hashlib.sha256("\n".join(files).encode()).hexdigest()[:12]
    return Path(sys.prefix, "jvm-archives", f"{name}-{key}.jsa")


def _recording(file: Path) -> Path:
    return file.with_suffix(".new")


def _is_complete(file: Path) -> bool:
    try:
        with file.open("rb") as recorded:
            return recorded.read(len(MAGIC)) == MAGIC
    except FileNotFoundError:
        return False
