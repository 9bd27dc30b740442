"""The Spark session of the sinks, tuned for small batches with little delay."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

import pyspark
from py4j.protocol import Py4JError
from pyspark.sql import DataFrame, SparkSession

from outbox.base import log
from outbox.base.settings import Settings
from outbox.jvm import archive
from outbox.jvm.jars import jars, spark_jars
from outbox.jvm.java import java
from outbox.kafka.clients import spark_options
from outbox.sink.target import Target

JVM_GONE = (Py4JError, ConnectionError)  # what a call raises when there is no JVM to take it
LOG_CONFIG = Path(__file__).with_name("log4j2.properties")
FETCH_MAX_WAIT_MS = 10
ARROW_BATCH_MAX_BYTES = 8 << 20
# A batch is thrown away as a whole once it is applied: a large young generation, and it is never copied.
GARBAGE_COLLECTOR = "-XX:+UseParallelGC -XX:NewRatio=1"
# Each poll is followed by look-ups of offsets, so that few polls make a large batch faster; within what memory holds.
MAX_POLL_RECORDS, MAX_PARTITION_FETCH_BYTES = 2_000, 4 << 20


def session(settings: Settings, targets: Iterable[Target] = ()) -> SparkSession:
    """Start Spark in this process's JVM child, which ends when this process does, however that comes about.

    ``targets`` are those of the sinks that will run; their jars are downloaded if they are missing. Raises Failure if
    that fails.
    """
    # PySpark's launcher searches by itself; it must find the Java that we have checked and its own jars.
    os.environ["JAVA_HOME"] = str(java().resolve().parent.parent)
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["SPARK_HOME"] = str(Path(pyspark.__file__).parent)
    for elsewhere in ("SPARK_CONF_DIR", "SPARK_DIST_CLASSPATH", "PYSPARK_SUBMIT_ARGS"):
        os.environ.pop(elsewhere, None)
    found = jars("spark")
    targets = list(targets)
    for name in sorted({name for target in targets for name in target.jars}):
        found += jars(name, log.get(__name__).info)
    scratch = settings.home / "spark"
    scratch.mkdir(parents=True, exist_ok=True)
    archived = " ".join(f'"{option}"' for option in archive.options("spark", [*jars("spark"), *spark_jars()]))
    java_options = f"-Dlog4j2.configurationFile=file://{quote(str(LOG_CONFIG))} {GARBAGE_COLLECTOR} {archived}"
    config = {
        "spark.master": "local[2]",
        "spark.app.name": "outbox sink",
        # Not spark.jars: a class archive holds classes of the class path only.
        "spark.driver.extraClassPath": ":".join(map(str, found)),
        "spark.driver.memory": settings.sink_driver_memory,
        "spark.driver.extraJavaOptions": java_options,
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.local.dir": str(scratch),
        "spark.sql.warehouse.dir": f"file://{scratch}/warehouse",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": "2",
        # What a Python worker of an executor holds at once.
        "spark.sql.execution.arrow.maxRecordsPerBatch": "10000",
        "spark.sql.execution.arrow.maxBytesPerBatch": str(ARROW_BATCH_MAX_BYTES),
        # Compiling each plan takes longer than running it on a few rows.
        "spark.sql.codegen.wholeStage": "false",
        # The default manager forks processes for each log file. This one renames too: safe when the process dies; when
        # the host dies, a log file may be cut off, which `checkpoint.repair` sees to.
        "spark.sql.streaming.checkpointFileManagerClass": (
            "org.apache.spark.sql.execution.streaming.FileSystemBasedCheckpointFileManager"
        ),
        "spark.hadoop.fs.file.impl": "org.apache.hadoop.fs.RawLocalFileSystem",
    }
    for target in targets:
        config |= target.spark_config
    builder = SparkSession.builder
    for name, value in config.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def stop(spark: SparkSession) -> None:
    """Stop Spark. If its JVM is gone, there is nothing to stop."""
    with suppress(*JVM_GONE):
        spark.stop()


def records(spark: SparkSession, settings: Settings, topic: str, starting_offsets: str) -> DataFrame:
    """The committed records of a topic, as a stream. ``starting_offsets`` counts where there is no checkpoint only."""
    options = {
        **spark_options(settings),
        "subscribe": topic,
        "startingOffsets": starting_offsets,
        "includeHeaders": "true",
        "kafka.isolation.level": "read_committed",
        "failOnDataLoss": "true",
        "maxOffsetsPerTrigger": str(settings.sink_max_offsets_per_trigger),
        "kafka.max.poll.records": str(MAX_POLL_RECORDS),
        "kafka.max.partition.fetch.bytes": str(MAX_PARTITION_FETCH_BYTES),
        # The look-ups queue behind the fetch that waits at the log's end.
        "kafka.fetch.max.wait.ms": str(FETCH_MAX_WAIT_MS),
    }
    return spark.readStream.format("kafka").options(**options).load()
