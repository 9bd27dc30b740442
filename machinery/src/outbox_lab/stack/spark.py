"""A Spark cluster of this host: a standalone master and its workers, each a controlled process on loopback.

It is a real cluster at the smallest size: executors are processes of the workers, and the sinks' driver runs
outside of them. A client needs the secret of the cluster, which is in ``spark.properties`` (mode 600) in the home
folder.
"""

from __future__ import annotations

import base64
import hmac
import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from outbox.base import envfile, project
from outbox.base.settings import Settings
from outbox.jvm.jars import pyspark_folder
from outbox.jvm.java import java_home, property_value
from outbox_lab.stack import config, internals, ports
from outbox_lab.stack.process import Process

SHARED = "spark.properties"  # in the home folder: with which a driver uses the cluster, its secret among them
DAEMON_HEAP = "192m"
EXECUTOR_HEAP = "512m"
# A worker has room for two executors: `outbox rebuild` runs beside a sink, each with one on every worker.
WORKER_CORES, WORKER_MEMORY = 2, "1g"
APPLICATIONS_KEPT_S = 24 * 60 * 60  # their logs
# Master and workers always have a UI. It asks for a signed token in a header, which no web page makes a browser send.
UI_FILTER = "org.apache.spark.ui.JWSFilter"
UI_SECRET = f"spark.{UI_FILTER}.param.secretKey"
# https://spark.apache.org/docs/4.1.1/configuration.html, https://spark.apache.org/docs/4.1.1/spark-standalone.html
PROPERTIES = f"""\
spark.authenticate                              true
spark.authenticate.secret                       {{secret}}
spark.driver.host                               {ports.LOOPBACK}
spark.driver.bindAddress                        {ports.LOOPBACK}
spark.executor.memory                           {EXECUTOR_HEAP}
spark.executor.cores                            1
spark.cores.max                                 {{workers}}
spark.executor.logs.rolling.strategy            size
spark.executor.logs.rolling.maxSize             {8 << 20}
spark.executor.logs.rolling.maxRetainedFiles    2
spark.ui.enabled                                false
spark.ui.filters                                {UI_FILTER}
{UI_SECRET}  {{secret}}
"""
# A master that starts again knows its workers and applications.
MASTER_PROPERTIES = """\
spark.master.rest.enabled           false
spark.deploy.recoveryMode           FILESYSTEM
spark.deploy.recoveryDirectory      recovery
"""
WORKER_PROPERTIES = f"""\
spark.worker.cleanup.enabled        true
spark.worker.cleanup.appDataTtl     {APPLICATIONS_KEPT_S}
"""


def write_properties(file: Path, workers: int) -> None:
    """Write what a driver needs to use so many workers. A secret that the file has, stays."""
    known = property_value("spark.authenticate.secret", file.read_text()) if file.exists() else None
    secret = known or secrets.token_urlsafe(32)  # a signature needs 256 bits
    envfile.write_private(file, PROPERTIES.format(secret=secret, workers=workers))


def ui_header(properties: str) -> dict[str, str]:
    """The header that lets a request into the UI of a driver, a master or a worker with these properties."""
    key = base64.urlsafe_b64decode(f"{property_value(UI_SECRET, properties)}==")
    signed = ".".join(map(_encoded, (b'{"alg":"HS256"}', b"{}")))
    return {"Authorization": f"Bearer {signed}.{_encoded(hmac.digest(key, signed.encode(), 'sha256'))}"}


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


class SparkDaemon(Process):
    """A JVM of Spark's own, started by Spark's own script."""

    main_class: str
    properties: str  # beside those of the cluster

    def __init__(self, name: str, settings: Settings) -> None:
        super().__init__(name, settings.home)
        self._properties = self.folder / "daemon.properties"
        self._shared_properties = self.home / SHARED

    @property
    def port(self) -> int:
        """The port of the cluster's master."""
        return internals.read(self.home).spark_port

    def arguments(self) -> Sequence[str | Path]:
        """The arguments of the main class."""
        raise NotImplementedError

    def argv(self) -> Sequence[str | Path]:
        common = ["--host", ports.LOOPBACK, "--webui-port", "0", "--properties-file", str(self._properties)]
        return [pyspark_folder() / "bin" / "spark-class", self.main_class, *common, *self.arguments()]

    def prepare(self) -> None:
        envfile.write_private(self._properties, self._shared_properties.read_text() + self.properties)
        log_config = config.file(config.SPARK_LOGGING)
        shutil.copy(log_config, self.folder / "log4j2.properties")  # executors look here too: SPARK_CONF_DIR

    def env(self) -> Mapping[str, str]:
        # Executors import this package and the project. They find them here, as they do not run in its folder.
        places = [Path(project.__file__).parents[2], project.current().root, os.environ.get("PYTHONPATH")]
        return {
            "JAVA_HOME": java_home(),
            "SPARK_HOME": str(pyspark_folder()),
            "SPARK_CONF_DIR": str(self.folder),
            "SPARK_DAEMON_MEMORY": DAEMON_HEAP,
            "SPARK_DAEMON_JAVA_OPTS": "-XX:+UseSerialGC -XX:+ExitOnOutOfMemoryError",
            "SPARK_LOCAL_IP": ports.LOOPBACK,
            "SPARK_LOCAL_DIRS": str(self.folder / "local"),
            "PYTHONPATH": os.pathsep.join(dict.fromkeys(str(place) for place in places if place)),
        }


class SparkMaster(SparkDaemon):
    """The cluster's master."""

    main_class = "org.apache.spark.deploy.master.Master"
    properties = MASTER_PROPERTIES

    def __init__(self, settings: Settings) -> None:
        super().__init__("spark-master", settings)

    def arguments(self) -> Sequence[str | Path]:
        return ["--port", str(self.port)]

    def prepare(self) -> None:
        ports.require_free(self.port, self.name)
        super().prepare()

    def is_ready(self) -> bool:
        return ports.is_open(self.port)


class SparkWorker(SparkDaemon):
    """A worker; its executors and their Python processes belong to it, and end with it."""

    main_class = "org.apache.spark.deploy.worker.Worker"
    properties = WORKER_PROPERTIES

    def __init__(self, number: int, settings: Settings) -> None:
        super().__init__(f"spark-worker-{number}", settings)

    def arguments(self) -> Sequence[str | Path]:
        master = f"spark://{ports.LOOPBACK}:{self.port}"
        return ["--cores", str(WORKER_CORES), "--memory", WORKER_MEMORY, "--work-dir", self.folder / "work", master]

    def is_ready(self) -> bool:
        """Whether it is connected to the master."""
        with suppress(psutil.Error):
            connections = psutil.Process(self.pid()).net_connections("tcp")
            return any(one.raddr and one.raddr.port == self.port for one in connections)
        return False
