"""The Java that the JVM parts run on: 17 or 21."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

from outbox.base.errors import Failure

SUPPORTED = (17, 21)
REMEDY = (
    "install Java 17 (Debian, Ubuntu: apt-get install openjdk-17-jre-headless; macOS: brew install openjdk@17) "
    "or point JAVA_HOME to a Java 17 or 21"
)


@cache
def java() -> Path:
    """The java program. Raises Failure if there is none, or one that Spark 4.0 does not run on."""
    home = os.environ.get("JAVA_HOME")
    found = str(Path(home, "bin", "java")) if home else shutil.which("java")
    if found is None or not Path(found).exists():
        raise Failure("no Java found", REMEDY)
    told = subprocess.run([found, "-version"], capture_output=True, text=True, check=False)
    version = re.search(r'version "(\d+)', told.stderr)
    if version is None or int(version[1]) not in SUPPORTED:
        raise Failure(f"{found} is Java {version[1] if version else '?'}, and Spark 4.0 needs 17 or 21", REMEDY)
    return Path(found)
