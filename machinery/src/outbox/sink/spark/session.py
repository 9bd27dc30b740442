"""The Spark session of the sinks, tuned for small batches with little delay.

`outbox sink` starts Spark itself: in a JVM of its own (`local[2]`), or with its driver there and executors on a cluster
(OUTBOX_SPARK_MASTER). `spark-submit` has started the driver's JVM already; master, jars and memory are then its own.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from urllib.parse import quote

import pyspark
from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from outbox.base import log, project
from outbox.base.errors import Failure
from outbox.base.settings import MSK_IAM, Settings
from outbox.jvm import archive
from outbox.jvm.jars import jars, spark_jars
from outbox.jvm.java import java_home, property_value
from outbox.kafka.clients import ALLOWED_URLS
from outbox.sink.spec import Target

JVM_GONE = (Py4JError, ConnectionError)  # what a call raises when there is no JVM to take it
SUBMITTED = "PYSPARK_GATEWAY_PORT"  # set for a process that spark-submit has started
LOCAL_MASTER = "local[2]"
LOOPBACK = "127.0.0.1"
S3 = "s3a://"
LOG_CONFIG = Path(__file__).with_name("driver-log4j2.properties")  # unless the project has its own
# Only the rows of a transform or a lakehouse pass through the JVM, so one thread is enough for its garbage, and one
# compiler for its code: the second one takes a core for the first minutes, and Spark makes classes anew for each plan.
# Without the second one Java would have 48 MB for code; the size here is what it has for both.
JVM_OPTIONS = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m"

# For every master.
CONFIG = {
    "spark.app.name": "outbox sink",
    "spark.sql.session.timeZone": "UTC",
    # By default PySpark also sends the JVM the source line of each DataFrame call, to show it in error messages. For a
    # small batch with a transform this is one round trip in five.
    "spark.python.sql.dataFrameDebugging.enabled": "false",
    "spark.python.daemon.module": "outbox.sink.spark.daemon",
    # The default manager forks processes for each log file. This one renames too: safe when the process dies; when the
    # host dies, a log file may be cut off: then another checkpoint begins.
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
    "spark.hadoop.fs.file.impl": "org.apache.hadoop.fs.RawLocalFileSystem",
}

# S3A buffers what it writes on the local disk, by a file system that must be of this class.
S3_CONFIG = {"spark.hadoop.fs.file.impl": "org.apache.hadoop.fs.LocalFileSystem"}

# For sessions whose queries have few rows: compiling a plan takes longer than running it, and many tasks take longer
# than few. They are settings of a session, not of the context: `newSession()` has Spark's own, for other queries.
FEW_ROWS = {"spark.sql.codegen.wholeStage": "false", "spark.sql.shuffle.partitions": "2"}


def session(settings: Settings, targets: Iterable[Target] = ()) -> SparkSession:
    """Start Spark in this process's JVM child, which ends when this process does, however that comes about.

    ``targets`` are those of the sinks that will run; their jars are downloaded if they are missing. Raises Failure if
    that fails, or if there is no cluster at the master's address.
    """
    targets = list(targets)
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # executors begin Python by this name
    config = dict(CONFIG) if SUBMITTED in os.environ else CONFIG | launch_config(settings, targets)
    if _storage(settings):
        config |= S3_CONFIG
    for target in targets:
        config |= target.spark_config
    builder = SparkSession.builder
    for name, value in config.items():
        builder = builder.config(name, value)
    try:
        spark = builder.getOrCreate()
        for name, value in FEW_ROWS.items():
            spark.conf.set(name, value)
        return spark
    except (PySparkException, *JVM_GONE) as error:
        where = "as submitted" if SUBMITTED in os.environ else f"on {_master(settings)}"
        raise Failure(
            f"Spark {where} does not start: {reason(error)}",
            "read what Spark says above; check the master's address, and that its cluster runs",
            code="spark-not-started",
        ) from None


def launch_config(settings: Settings, targets: Iterable[Target]) -> dict[str, str]:
    """Prepare the environment of the driver's JVM, and return the properties that it starts with."""
    scratch = settings.home / "spark"
    scratch.mkdir(parents=True, exist_ok=True)
    # PySpark's launcher searches by itself; it must find the Java that we have checked and its own jars.
    os.environ["JAVA_HOME"] = java_home()
    os.environ["SPARK_HOME"] = str(Path(pyspark.__file__).parent)
    os.environ["SPARK_LOCAL_DIRS"] = str(scratch)  # of this process; those of executors are their cluster's
    for elsewhere in ("SPARK_CONF_DIR", "SPARK_DIST_CLASSPATH", "PYSPARK_SUBMIT_ARGS"):
        os.environ.pop(elsewhere, None)
    properties = settings.spark_properties
    if properties:
        os.environ["PYSPARK_SUBMIT_ARGS"] = f"--properties-file {shlex.quote(str(properties.absolute()))} pyspark-shell"
    found = jars("spark")
    logins = {"msk"} if settings.kafka_sasl_mechanism == MSK_IAM else set()
    needed = sorted({name for target in targets for name in target.jars} | _storage(settings) | logins)
    further = [jar for name in needed for jar in jars(name, log.get(__name__).info)]
    log_config = project.current().file(LOG_CONFIG)
    archived = " ".join(f'"{option}"' for option in archive.options("spark", [*found, *spark_jars()]))
    allowed = f'"-D{ALLOWED_URLS}={settings.kafka_token_url}"' if settings.kafka_token_url else ""
    return {
        "spark.driver.memory": settings.sink_driver_memory,
        "spark.driver.extraJavaOptions": (
            f"-Dlog4j2.configurationFile=file://{quote(str(log_config))} {JVM_OPTIONS} {allowed} {archived}"
        ),
        # A class archive holds classes of one class path. So what few sinks need comes by `spark.jars`.
        "spark.driver.extraClassPath": ":".join(map(str, found)),
        # Hadoop's own starts a process for each file that it writes, to set its permissions.
        "spark.hadoop.fs.file.impl": "com.globalmentor.apache.hadoop.fs.NakedLocalFileSystem",
        "spark.sql.warehouse.dir": f"file://{scratch}/warehouse",
        "spark.ui.showConsoleProgress": "false",
        **_ui(settings, properties),
        **_of_master(_master(settings), found, further),
    }


def _storage(settings: Settings) -> set[str]:
    """The configurations of ivy.xml for the file systems of checkpoints and tables that PySpark does not bring."""
    return {"s3"} if settings.checkpoints.startswith(S3) else set()


def _ui(settings: Settings, properties: Path | None) -> dict[str, str]:
    """Spark's UI is off, unless the file of properties has it, with a filter. Raises Failure without a filter."""
    given = properties.read_text() if properties else ""
    if property_value("spark.ui.enabled", given) != "true":
        return {"spark.ui.enabled": "false"}
    if not property_value("spark.ui.filters", given):
        raise Failure(
            f"Spark's UI would answer everybody: {properties} has spark.ui.enabled and no spark.ui.filters",
            "add the filter that docs/runbook.md names, or one of yours",
            code="ui-open",
        )
    if _master(settings).startswith("local") or property_value("spark.driver.host", given) == LOOPBACK:
        os.environ["SPARK_LOCAL_IP"] = LOOPBACK  # where it listens; executors elsewhere look for the driver there too
    return {"spark.ui.killEnabled": "false"}  # a job that is killed there would end the sink


def _master(settings: Settings) -> str:
    return settings.spark_master or LOCAL_MASTER


def _of_master(master: str, found: Sequence[Path], further: Sequence[Path]) -> dict[str, str]:
    """The properties of a place to run tasks: threads of the driver's JVM, which has the jars ``found`` in its class
    path, or a cluster that needs all jars.
    """
    if not master.startswith("local"):
        return {"spark.master": master, "spark.jars": ",".join(map(str, [*found, *further]))}
    os.environ["PYSPARK_PYTHON"] = sys.executable
    properties = {
        "spark.master": master,
        "spark.driver.host": LOOPBACK,
        "spark.driver.bindAddress": LOOPBACK,
        # The driver has no executors here, yet it listens for them, and takes objects of Java: it makes a secret that
        # nobody knows.
        "spark.authenticate": "true",
    }
    if further:
        properties["spark.jars"] = ",".join(f"local:{jar}" for jar in further)  # read where they are, and not copied
    return properties


def reason(error: Exception) -> str:
    """Java's message without its stack trace."""
    message = error.java_exception.toString() if isinstance(error, Py4JJavaError) else error
    return str(message).partition("\n")[0]
