"""The jars of the JVM parts, downloaded once per user by Ivy, which is part of PySpark. ivy.xml names the versions.

python -m outbox.jvm.jars plugin     download a configuration if it is missing, and print its folder
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import platformdirs

from outbox.base.errors import Failure
from outbox.jvm.java import PACKAGED_HOME, java

IVY_FILE = Path(__file__).with_name("ivy.xml")
# What is downloaded together, and how it is reported. Each optional part is a set of its own.
SETS = {
    ("kafka", "plugin", "spark"): "the JVM parts (Kafka, Connect, Debezium, Spark's Kafka source): about 100 MB",
    ("lakehouse",): "Delta Lake for Spark: about 8 MB",
}
CONFIGURATION = re.compile(r'<conf name="(\w+)"')
# To ask for the sources and documentation of each part would take longer than to download the parts.
IVY_SETTINGS = """<ivysettings><settings defaultResolver="maven"/>
<property name="ivy.maven.lookup.sources" value="false"/><property name="ivy.maven.lookup.javadoc" value="false"/>
<resolvers><ibiblio name="maven" m2compatible="true" {root}/></resolvers></ivysettings>"""


def jars(configuration: str, report: Callable[[str], None] = lambda _: None) -> list[Path]:
    """The jars of a configuration of ivy.xml: kafka, plugin, spark or lakehouse."""
    return sorted(resolve(configuration, report).glob("lib/*.jar"))


def spark_jars() -> list[Path]:
    """The jars of Spark itself, which PySpark brings. Raises Failure if PySpark is not installed."""
    pyspark = importlib.util.find_spec("pyspark")
    if pyspark is None or pyspark.origin is None:
        raise Failure("PySpark is not installed", "run make install", code="package-missing")
    return sorted(Path(pyspark.origin).parent.glob("jars/*.jar"))


def class_path(configuration: str, ivy_file: Path = IVY_FILE) -> str:
    """A JVM class path of all the jars of a configuration."""
    return str(resolve(configuration, ivy_file=ivy_file) / "lib" / "*")


def resolve(configuration: str, report: Callable[[str], None] = lambda _: None, ivy_file: Path = IVY_FILE) -> Path:
    """The folder of a configuration, with its jars in ``lib``, so that it can be a plugin path of Connect.

    The first use downloads it with the others of its set. An existing folder is complete, because one rename put it
    there. Raises Failure if the download fails.
    """
    together = _set(configuration, ivy_file)
    version = hashlib.sha256(ivy_file.read_bytes()).hexdigest()[:12]
    folder = _cache() / f"{version}-{together[0]}"
    if not folder.exists():
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            lock = (folder.parent / "lock").open("w")
        except OSError as error:
            raise Failure(
                f"the jars of {configuration} are missing, and {folder.parent} is not writable: {error.strerror}",
                f"run as a user who may write there: python -m outbox.jvm.jars {configuration}",
                code="jars-not-writable",
            ) from None
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the second of two first starts waits, and finds them
            if not folder.exists():
                _download(ivy_file, together, folder, report)
    return folder / configuration


def _cache() -> Path:
    return platformdirs.user_cache_path("outbox") / "jars"


def _set(configuration: str, ivy_file: Path) -> tuple[str, ...]:
    if ivy_file == IVY_FILE:
        [together] = [together for together in SETS if configuration in together]
        return together
    return tuple(CONFIGURATION.findall(ivy_file.read_text()))


def _download(ivy_file: Path, together: tuple[str, ...], folder: Path, report: Callable[[str], None]) -> None:
    report(f"downloading {SETS.get(together, ivy_file.name)}, once per user")
    ivy_cache = folder.parent / "ivy"  # kept until the end, so that an interrupted download continues
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        ivy_settings = Path(temporary, "ivysettings.xml")
        mirror = _mirror()
        ivy_settings.write_text(IVY_SETTINGS.format(root=f'root="{mirror}"' if mirror else ""))
        made = Path(temporary, "jars")
        files: list[str | Path] = ["-settings", ivy_settings, "-ivy", ivy_file, "-cache", ivy_cache]
        what = ["-confs", *together, "-types", "jar", "bundle"]
        where = ["-retrieve", f"{made}/[conf]/lib/[artifact]-[revision](-[classifier]).[ext]"]
        ivy_jar = next(jar for jar in spark_jars() if jar.name.startswith("ivy-"))
        ivy_main = ["-cp", str(ivy_jar), "org.apache.ivy.Main"]
        argv: list[str | Path] = [java(), *_trust(Path(temporary, "trusted")), *ivy_main, *files, *what, *where]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as ivy:
            output = _follow(ivy, report)
        if ivy.returncode != 0:
            raise Failure(
                "Ivy could not download the JVM parts:\n" + "\n".join(output[-15:]),
                "check the network, or name a mirror of Maven Central in OUTBOX_MAVEN_MIRROR",
                code="jars-not-downloaded",
            )
        made.rename(folder)
    shutil.rmtree(ivy_cache)


def _mirror() -> str | None:
    """The setting ``maven_mirror``. Given by the environment, if only as empty, it takes no other module: the image's
    jars are made without the settings, so that a change of the settings does not download them again.
    """
    given = os.environ.get("OUTBOX_MAVEN_MIRROR")
    if given is not None:
        return given
    from outbox.base import settings

    return settings.load().maven_mirror


def _trust(file: Path) -> list[str]:
    """Options that make the packaged Java trust the machine's authorities; the machine's own Java does so already."""
    if PACKAGED_HOME not in java().parents:
        return []
    from outbox.jvm import truststore

    return [f"-Djavax.net.ssl.trustStore={file}"] if truststore.write(file) else []


def _follow(ivy: subprocess.Popen[str], report: Callable[[str], None]) -> list[str]:
    """Read the output of Ivy, report the number of downloaded jars, and return the lines."""
    lines, fetched = [], 0
    for line in ivy.stdout or ():
        lines.append(line.rstrip())
        if "[SUCCESSFUL ]" in line and ".jar" in line:
            fetched += 1
            if fetched % 20 == 0:
                report(f"  {fetched} jars")
    return lines


if __name__ == "__main__":
    try:
        print(resolve(sys.argv[1], report=lambda line: print(line, file=sys.stderr)))  # noqa: T201
    except Failure as failure:
        sys.exit(f"outbox: {failure}")
