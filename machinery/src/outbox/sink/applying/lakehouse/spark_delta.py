"""The Delta table of a sink in a Spark session."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from outbox.base.errors import Failure
from outbox.base.wait import WaitTimeoutError, wait_for
from outbox.sink.applying.lakehouse.spark_table import Table, literal
from outbox.sink.spec import SinkSpec

LOCK_TIMEOUT_S = 60
COMMIT_METADATA = "spark.databricks.delta.commitInfo.userMetadata"


class DeltaTable(Table):
    """A Delta table, in a database of its own: all sessions of a process share the names of tables, and a name that is
    taken would mean the table of another sink.
    """

    _numbers = itertools.count()
    session: Mapping[str, str] = {
        # Few rows are written by one task. Many rows are written by several, and each has enough for files of its own.
        "spark.databricks.delta.merge.repartitionBeforeWrite.enabled": "false",
        # A batch without anything new is committed too, as it says how far the table is.
        "spark.databricks.delta.skipRecordingEmptyCommits": "false",
        # How much a task holds of the file that it writes; and its size is looked at from the first row on, not after
        # 100.
        "parquet.block.size": str(16 << 20),
        "parquet.block.size.row.check.min": "1",
        "parquet.page.size.row.check.min": "1",
    }

    def __init__(self, spark: SparkSession, spec: SinkSpec, schema: str, uri: str) -> None:
        super().__init__(spark, spec, schema, uri)
        self._database = f"lakehouse_{next(self._numbers)}"

    def make(self) -> None:
        with self.errors("differs from what its SQL declares"), self.alone():
            self._remove_unborn()
            self._spark.sql(f"CREATE DATABASE IF NOT EXISTS {self._database}")
            self._spark.sql(f"USE {self._database}")
            self._spark.sql(self._schema % {"location": literal(self._uri)})

    def exists(self) -> bool:
        files, log = self._log()
        return bool(files.exists(log))

    def commit(self, merge: str, said: Mapping[str, Any] | None) -> int:
        if said is not None:
            self._spark.conf.set(COMMIT_METADATA, json.dumps(said))
        [counted] = self._spark.sql(merge).collect()
        return int(counted["num_inserted_rows"])

    def events(self) -> DataFrame:
        return self._spark.read.format("delta").load(self._uri)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """On a local disk, no other process writes to the table within the block."""
        if not self._uri.startswith("file:"):
            yield
            return
        folder = Path(self._uri.removeprefix("file://"))
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Held by the JVM because the JVM writes: it lives a moment longer than a process that is killed.
        file = self._jvm.java.io.RandomAccessFile(f"{folder}.lock", "rw")
        try:
            wait_for(f"{folder}.lock", lambda: file.getChannel().tryLock(), timeout_s=LOCK_TIMEOUT_S)
            yield
        except WaitTimeoutError:
            raise Failure(
                f"sink {self._sink}: another process writes to the table at {self._uri}: it has {folder}.lock",
                "end it, and start the sink again",
                code="table-locked",
            ) from None
        finally:
            file.close()

    def _log(self) -> tuple[Any, Any]:
        """Hadoop's file system, and the folder of the table's log in it."""
        log = self._jvm.org.apache.hadoop.fs.Path(f"{self._uri}/_delta_log")
        return log.getFileSystem(self._spark._jsparkSession.sessionState().newHadoopConf()), log

    def _remove_unborn(self) -> None:
        """Remove the log of a table whose making was interrupted before its first commit: Delta would refuse to make
        the table where something is.
        """
        files, log = self._log()
        if files.exists(log):
            names = [status.getPath().getName() for status in files.listStatus(log)]
            if all(name.startswith(".") for name in names):  # a commit that was not renamed into place
                files.delete(log, True)
