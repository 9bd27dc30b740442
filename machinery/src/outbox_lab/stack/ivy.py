"""Ivy, which ships inside PySpark's jars, finds the jars that dependencies need. `make lock` and tests use it.

python -m outbox_lab.stack.ivy     write jars.lock again, after a change of ivy.xml
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from outbox.base.errors import Failure
from outbox.jvm import jars
from outbox.jvm.jars import IVY_FILE, LOCK_FILE, SETS, Jar
from outbox.jvm.java import java

SETTINGS = """<ivysettings><settings defaultResolver="maven"/>
<property name="ivy.maven.lookup.sources" value="false"/><property name="ivy.maven.lookup.javadoc" value="false"/>
<resolvers><ibiblio name="maven" m2compatible="true" root="{mirror}"/></resolvers></ivysettings>"""
HEADER = "# Written by `make lock` from ivy.xml: configuration, organisation, module, version and SHA-256 of each jar."


def resolve(ivy_file: Path, configuration: str) -> Path:
    """The folder of the jars of a configuration in a file that is not ours. Raises Failure if they cannot be had."""
    version = hashlib.sha256(ivy_file.read_bytes()).hexdigest()[:12]
    folder = jars.cache_folder() / f"{version}-{configuration}"

    def download(made: Path) -> None:
        _retrieve(ivy_file, [configuration], f"{made}/[conf]/lib/[artifact]-[revision](-[classifier]).[ext]")

    return jars.made_once(folder, download) / configuration


def lock() -> None:
    """Write jars.lock: what Ivy resolves ivy.xml to, and the checksum of each jar."""
    configurations = [configuration for together in SETS for configuration in together]
    with tempfile.TemporaryDirectory() as temporary:
        _retrieve(IVY_FILE, configurations, f"{temporary}/[conf]/[organisation]/[module]/[revision]/[artifact].[ext]")
        found = [
            Jar._make([*file.relative_to(temporary).parts[:4], hashlib.sha256(file.read_bytes()).hexdigest()])
            for configuration in configurations
            for file in sorted(Path(temporary, configuration).rglob("*.jar"))
        ]
    LOCK_FILE.write_text("".join(f"{line}\n" for line in [HEADER, *map(" ".join, found)]))


def _retrieve(ivy_file: Path, configurations: Sequence[str], pattern: str) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        settings_file = Path(temporary, "settings.xml")
        settings_file.write_text(SETTINGS.format(mirror=jars.mirror()))
        ivy_jar = next(jars.pyspark_folder().glob("jars/ivy-*.jar"))
        files = ["-settings", str(settings_file), "-ivy", str(ivy_file), "-cache", f"{temporary}/cache"]
        what = ["-confs", *configurations, "-types", "jar", "bundle", "-retrieve", pattern]
        argv = [str(java()), "-cp", str(ivy_jar), "org.apache.ivy.Main", *files, *what]
        ivy = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if ivy.returncode != 0:
        raise Failure(
            "Ivy could not download the JVM parts:\n" + "\n".join(ivy.stdout.splitlines()[-15:]),
            jars.REMEDY,
            code="jars-not-downloaded",
        )


if __name__ == "__main__":
    try:
        lock()
    except Failure as failure:
        sys.exit(f"outbox: {failure}")
