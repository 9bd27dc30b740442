"""The JVM parts, downloaded once per user. ivy.xml says what is wanted, jars.lock which jars that is.

python -m outbox.jvm.jars plugin     download the jars of a configuration if need be, and print their folder
python -m outbox.jvm.jars lock       write jars.lock again, after a change of ivy.xml
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import platformdirs

from outbox.base.errors import Failure
from outbox.jvm import ivy

if TYPE_CHECKING:
    from outbox.base.terminal import Progress

IVY_FILE = Path(__file__).with_name("ivy.xml")
LOCK_FILE = Path(__file__).with_name("jars.lock")
# What is downloaded together, and how it is announced. An optional part is a set of its own.
SETS = {
    ("kafka", "plugin", "spark"): "the JVM parts (Kafka, Connect, Debezium, Spark's Kafka source): about 75 MB",
    ("lakehouse",): "Delta Lake for Spark: about 12 MB",
    ("s3",): "S3 for Spark: about 10 MB",
}
CONFIGURATION = re.compile(r'<conf name="(\w+)"')
IVY_MODULE = """<ivy-module version="2.0"><info organisation="outbox" module="jvm"/>
<configurations>{configurations}</configurations><dependencies>{dependencies}</dependencies></ivy-module>"""


class Jar(NamedTuple):
    """One line of jars.lock."""

    configuration: str
    organisation: str
    module: str
    revision: str
    sha256: str

    @property
    def path(self) -> Path:
        """Where it is in the folder of its set."""
        return Path(self.configuration, "lib", f"{self.module}-{self.revision}.jar")


def jars(configuration: str, report: Progress = lambda _: None) -> list[Path]:
    """The jars of a configuration of ivy.xml: kafka, plugin, spark, lakehouse or s3."""
    return sorted(resolve(configuration, report).glob("lib/*.jar"))


def spark_jars() -> list[Path]:
    """The jars of Spark itself, which PySpark brings. Raises Failure if PySpark is not installed."""
    return sorted(ivy.pyspark_folder().glob("jars/*.jar"))


def class_path(configuration: str, ivy_file: Path = IVY_FILE) -> str:
    """A JVM class path of all the jars of a configuration."""
    return str(resolve(configuration, ivy_file=ivy_file) / "lib" / "*")


def resolve(configuration: str, report: Progress = lambda _: None, ivy_file: Path = IVY_FILE) -> Path:
    """The folder of a configuration; its jars are in ``lib`` in there, which makes it a plugin path of Connect.

    Downloads it the first time, together with the others of its set; an existing folder is complete, because one
    rename puts it there. Every jar of ours has the SHA-256 in jars.lock. Raises Failure if they cannot be had.
    """
    is_ours = ivy_file == IVY_FILE
    together = _set(configuration) if is_ours else tuple(CONFIGURATION.findall(ivy_file.read_text()))
    version = hashlib.sha256((LOCK_FILE if is_ours else ivy_file).read_bytes()).hexdigest()[:12]
    folder = cache_folder() / f"{version}-{together[0]}"
    if not folder.exists():
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            lock = os.open(folder.parent / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, mode=0o600)
        except OSError as error:
            raise Failure(
                f"the jars of {configuration} are missing, and {folder.parent} cannot be written: {error.strerror}",
                f"as a user who may write there: python -m outbox.jvm.jars {configuration}",
                code="jars-not-writable",
            ) from None
        with os.fdopen(lock, "rb"):
            fcntl.flock(lock, fcntl.LOCK_EX)  # of two first starts at once, the second waits and finds them
            if not folder.exists():
                report(f"downloading {SETS.get(together, ivy_file.name)}, once per user")
                _download(None if is_ours else ivy_file, together, folder, report)
    return folder / configuration


def locked(configurations: Iterable[str]) -> list[Jar]:
    """The jars of configurations in jars.lock."""
    lines = (line for line in LOCK_FILE.read_text().splitlines() if not line.startswith("#"))
    return [jar for jar in map(Jar._make, map(str.split, lines)) if jar.configuration in configurations]


def lock() -> None:
    """Write jars.lock: what Ivy resolves ivy.xml to, and the checksum of each jar."""
    configurations = [configuration for together in SETS for configuration in together]
    with tempfile.TemporaryDirectory() as temporary:
        pattern = f"{temporary}/[conf]/[organisation]/[module]/[revision]/[artifact].[ext]"
        ivy.retrieve(IVY_FILE, configurations, pattern, Path(temporary), is_complete=False, report=lambda _: None)
        found = [
            Jar._make([*file.relative_to(temporary).parts[:4], _sha256(file)])
            for configuration in configurations
            for file in sorted(Path(temporary, configuration).rglob("*.jar"))
        ]
    header = (
        "# Written by `make lock` from ivy.xml: configuration, organisation, module, version and SHA-256 of each jar.\n"
    )
    LOCK_FILE.write_text(header + "".join(" ".join(jar) + "\n" for jar in found))


def cache_folder() -> Path:
    return platformdirs.user_cache_path("outbox") / "jars"


def _set(configuration: str) -> tuple[str, ...]:
    [together] = [together for together in SETS if configuration in together]
    return together


def _download(ivy_file: Path | None, together: Sequence[str], folder: Path, report: Progress) -> None:
    """Download a set of ours, or the configurations of ``ivy_file``, to ``folder``."""
    ivy_folder = folder.parent / "ivy"  # kept until all is there, so that an interrupted download goes on
    ivy_folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        made = Path(temporary, "jars")
        pattern = f"{made}/[conf]/lib/[artifact]-[revision](-[classifier]).[ext]"
        if ivy_file is None:
            expected = locked(together)
            ivy_file = Path(temporary, "ivy.xml")
            ivy_file.write_text(_flat(together, expected))
            ivy.retrieve(ivy_file, together, pattern, ivy_folder, is_complete=True, report=report)
            changed = [jar.path.name for jar in expected if _sha256(made / jar.path) != jar.sha256]
        else:
            ivy.retrieve(ivy_file, together, pattern, ivy_folder, is_complete=False, report=report)
            changed = []
        shutil.rmtree(ivy_folder)
        if changed:
            raise Failure(
                f"not the jars that were locked: {', '.join(changed)}",
                "find out what changed them; a mirror in OUTBOX_MAVEN_MIRROR may have",
                code="jars-changed",
            )
        made.rename(folder)


def _flat(configurations: Sequence[str], expected: Sequence[Jar]) -> str:
    """A file of Ivy that names every jar."""
    return IVY_MODULE.format(
        configurations="".join(f'<conf name="{name}"/>' for name in configurations),
        dependencies="".join(
            f'<dependency org="{jar.organisation}" name="{jar.module}" rev="{jar.revision}"'
            f' conf="{jar.configuration}-&gt;default" transitive="false"/>'
            for jar in expected
        ),
    )


def _sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


if __name__ == "__main__":
    try:
        if sys.argv[1] == "lock":
            lock()
        else:
            print(resolve(sys.argv[1], report=lambda line: print(line, file=sys.stderr)))  # noqa: T201
    except Failure as failure:
        sys.exit(f"outbox: {failure}")
