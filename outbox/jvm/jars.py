"""The JVM parts, resolved once a user by Ivy, which ships inside PySpark's jars. What and which version: ivy.xml.

python -m outbox.jvm.jars plugin     print the folder of a configuration, resolving it if need be
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
# What is resolved together, and how it is told. What is optional is a set of its own, for those who choose it.
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


def class_path(configuration: str, ivy_file: Path = IVY_FILE) -> str:
    """A JVM class path of all the jars of a configuration."""
    return str(resolve(configuration, ivy_file=ivy_file) / "lib" / "*")


def resolve(configuration: str, report: Callable[[str], None] = lambda _: None, ivy_file: Path = IVY_FILE) -> Path:
    """The folder of a configuration; its jars are in ``lib`` in there, which makes it a plugin path of Connect.

    Downloads it the first time, together with the others of its set; a folder that is there is complete, as it was put
    there by one rename. Raises Failure if they cannot be had.
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
                f"the jars of {configuration} are not there, and cannot be kept in {folder.parent}: {error.strerror}",
                f"as a user who may write there: python -m outbox.jvm.jars {configuration}",
            ) from None
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # of two first starts at once, the second waits and finds them
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
    report(f"downloading {SETS.get(together, ivy_file.name)}, once a user")
    ivy_cache = folder.parent / "ivy"  # kept until all is there, so that an interrupted download goes on
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        ivy_settings = Path(temporary, "ivysettings.xml")
        mirror = _mirror()
        ivy_settings.write_text(IVY_SETTINGS.format(root=f'root="{mirror}"' if mirror else ""))
        made = Path(temporary, "jars")
        files: list[str | Path] = ["-settings", ivy_settings, "-ivy", ivy_file, "-cache", ivy_cache]
        what = ["-confs", *together, "-types", "jar", "bundle"]
        where = ["-retrieve", f"{made}/[conf]/lib/[artifact]-[revision](-[classifier]).[ext]"]
        ivy_main = ["-cp", str(_ivy_jar()), "org.apache.ivy.Main"]
        argv: list[str | Path] = [java(), *_trust(Path(temporary, "trusted")), *ivy_main, *files, *what, *where]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as ivy:
            told = _follow(ivy, report)
        if ivy.returncode != 0:
            raise Failure(
                "Ivy could not resolve the JVM parts:\n" + "\n".join(told[-15:]),
                "check the network, or name a mirror of Maven Central in OUTBOX_MAVEN_MIRROR",
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
    """Read what Ivy says, report how many jars have come, and return the lines."""
    told, fetched = [], 0
    for line in ivy.stdout or ():
        told.append(line.rstrip())
        if "[SUCCESSFUL ]" in line and ".jar" in line:
            fetched += 1
            if fetched % 20 == 0:
                report(f"  {fetched} jars")
    return told


def _ivy_jar() -> Path:
    pyspark = importlib.util.find_spec("pyspark")
    if pyspark is None or pyspark.origin is None:
        raise Failure("PySpark is not installed", "run make install")
    return next(Path(pyspark.origin).parent.glob("jars/ivy-*.jar"))


if __name__ == "__main__":
    try:
        print(resolve(sys.argv[1], report=lambda line: print(line, file=sys.stderr)))  # noqa: T201
    except Failure as failure:
        sys.exit(f"outbox: {failure}")
