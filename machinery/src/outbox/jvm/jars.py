"""The JVM parts, downloaded once per user. ivy.xml says what is wanted, jars.lock which jars that is.

python -m outbox.jvm.jars plugin     download the jars of a configuration if need be, and print their folder
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import ssl
import sys
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

import platformdirs

from outbox.base.errors import Failure

if TYPE_CHECKING:
    from outbox.base.terminal import Progress

IVY_FILE = Path(__file__).with_name("ivy.xml")
LOCK_FILE = Path(__file__).with_name("jars.lock")
# What is downloaded together, and how it is announced. An optional part is a set of its own.
SETS = {
    ("kafka", "plugin", "spark"): "the JVM parts (Kafka, Connect, Debezium, Spark's Kafka source): about 75 MB",
    ("lakehouse",): "Delta Lake for Spark: about 12 MB",
    ("iceberg",): "Iceberg for Spark: about 49 MB",
    ("s3",): "S3 for Spark: about 10 MB",
    ("msk",): "Amazon MSK's logins for Spark: about 8 MB",
    ("cassandra",): "a Cassandra server for tests: about 50 MB",
}
MAVEN_CENTRAL = "https://repo1.maven.org/maven2"
DOWNLOADS = 8  # at once
SILENCE_TIMEOUT_S = 60.0
REMEDY = "check the network, or name a mirror of Maven Central in OUTBOX_MAVEN_MIRROR"


class Jar(NamedTuple):
    """One line of jars.lock."""

    configuration: str
    organisation: str
    module: str
    revision: str
    sha256: str

    @property
    def path(self) -> Path:
        return Path(self.configuration, "lib", f"{self.module}-{self.revision}.jar")

    @property
    def url_path(self) -> str:
        return f"{self.organisation.replace('.', '/')}/{self.module}/{self.revision}/{self.path.name}"


def jars(configuration: str, report: Progress = lambda _: None) -> list[Path]:
    """The jars of a configuration of ivy.xml: kafka, plugin, spark, lakehouse, iceberg, s3, msk or cassandra."""
    return sorted(resolve(configuration, report).glob("lib/*.jar"))


def spark_jars() -> list[Path]:
    """The jars of Spark itself, which PySpark brings. Raises Failure if PySpark is not installed."""
    return sorted(pyspark_folder().glob("jars/*.jar"))


def class_path(configuration: str) -> str:
    """A JVM class path of all the jars of a configuration."""
    return str(resolve(configuration) / "lib" / "*")


def resolve(configuration: str, report: Progress = lambda _: None) -> Path:
    """The folder of a configuration; its jars are in ``lib`` in there, which makes it a plugin path of Connect.

    Downloads it the first time, together with the others of its set. Every jar has the SHA-256 in jars.lock. Raises
    Failure if they cannot be had.
    """
    [together] = [together for together in SETS if configuration in together]
    version = hashlib.sha256(LOCK_FILE.read_bytes()).hexdigest()[:12]

    def download(folder: Path) -> None:
        report(f"downloading {SETS[together]}, once per user")
        _download(locked(together), folder, report)

    return made_once(cache_folder() / f"{version}-{together[0]}", download) / configuration


def made_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """A folder that ``make`` fills the first time. An existing folder is complete: it gets its name at the end.

    What an interrupted ``make`` has left is kept for the next one.
    """
    if not folder.exists():
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            lock = os.open(folder.parent / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, mode=0o600)
        except OSError as error:
            raise Failure(
                f"jars are missing, and {folder.parent} cannot be written: {error.strerror}",
                "run the command once as a user who may write there",
                code="jars-not-writable",
            ) from None
        with os.fdopen(lock, "rb"):
            fcntl.flock(lock, fcntl.LOCK_EX)  # of two first starts at once, the second waits and finds them
            if not folder.exists():
                partly = folder.with_name(f"{folder.name}.part")
                partly.mkdir(exist_ok=True)
                make(partly)
                partly.rename(folder)
    return folder


def locked(configurations: Iterable[str]) -> list[Jar]:
    lines = (line for line in LOCK_FILE.read_text().splitlines() if not line.startswith("#"))
    return [jar for jar in map(Jar._make, map(str.split, lines)) if jar.configuration in configurations]


def cache_folder() -> Path:
    return platformdirs.user_cache_path("outbox") / "jars"


def mirror() -> str:
    """The setting ``maven_mirror``, or Maven Central. Given by the environment, if only as empty, it takes no other
    module: the image's jars are made without the settings, so that a change of the settings does not download them
    again. Raises Failure if the URL has a login.
    """
    given = os.environ.get("OUTBOX_MAVEN_MIRROR")
    if given is None:
        from outbox.base import settings

        given = settings.load().maven_mirror
    if given and "@" in urlsplit(given).netloc:  # nobody here logs in by a URL, and errors would show it
        raise Failure(
            "the URL of OUTBOX_MAVEN_MIRROR has a login", "name a mirror that asks for none", code="jars-not-downloaded"
        )
    return (given or MAVEN_CENTRAL).rstrip("/")


def pyspark_folder() -> Path:
    """Where PySpark is installed. It is not imported. Raises Failure if it is missing."""
    pyspark = importlib.util.find_spec("pyspark")
    if pyspark is None or pyspark.origin is None:
        raise Failure("PySpark is not installed", "run make install", code="pyspark-missing")
    return Path(pyspark.origin).parent


def _download(wanted: Sequence[Jar], folder: Path, report: Progress) -> None:
    """Download the jars that ``folder`` lacks."""
    import certifi  # of requests

    trusted = ssl.create_default_context()  # SSL_CERT_FILE and SSL_CERT_DIR, or the machine's authorities
    trusted.load_verify_locations(certifi.where())  # some Pythons find none on their machine
    lacking = [jar for jar in wanted if not _is_there(folder / jar.path, jar.sha256)]
    with ThreadPoolExecutor(DOWNLOADS) as pool:
        for number, _ in enumerate(pool.map(partial(_fetch, mirror(), trusted, folder), lacking), 1):
            if number % 20 == 0:
                report(f"  {number} jars")


def _is_there(file: Path, sha256: str) -> bool:
    return file.exists() and hashlib.sha256(file.read_bytes()).hexdigest() == sha256


def _fetch(repository: str, trusted: ssl.SSLContext, folder: Path, jar: Jar) -> None:
    url = f"{repository}/{jar.url_path}"
    try:
        with urllib.request.urlopen(url, timeout=SILENCE_TIMEOUT_S, context=trusted) as response:  # noqa: S310
            content: bytes = response.read()
    except (OSError, HTTPException) as error:
        raise Failure(f"{url} could not be downloaded: {error}", REMEDY, code="jars-not-downloaded") from error
    if hashlib.sha256(content).hexdigest() != jar.sha256:
        raise Failure(
            f"{url} is not the jar that was locked",
            "find out what changed it; a mirror in OUTBOX_MAVEN_MIRROR may have",
            code="jars-changed",
        )
    file = folder / jar.path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)


if __name__ == "__main__":
    try:
        print(resolve(sys.argv[1], report=lambda line: print(line, file=sys.stderr)))  # noqa: T201
    except Failure as failure:
        sys.exit(f"outbox: {failure}")
