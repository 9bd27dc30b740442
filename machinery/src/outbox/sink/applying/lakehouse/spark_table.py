"""The table of a sink in a Spark session: it is made, searched for events, and merged into.

`Table` is one of Delta; what another format does in other ways are its methods without an underscore (`spark_iceberg`).
"""

from __future__ import annotations

import gc
import itertools
import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from outbox.base.errors import Failure, kind_of
from outbox.base.wait import WaitTimeoutError, wait_for
from outbox.sink.decoding.ids import days
from outbox.sink.spark.session import FEW_ROWS, reason
from outbox.sink.spec import SinkSpec

LOCK_TIMEOUT_S = 60
SESSION = {
    **FEW_ROWS,
    "spark.sql.adaptive.enabled": "false",  # it plans again after each stage, which takes longer than few rows do
    "spark.sql.shuffle.partitions": "1",
    "spark.sql.execution.arrow.localRelationThreshold": "48MB",
    # Few rows are written by one task. Many rows are written by several, and each has enough for files of its own.
    "spark.databricks.delta.merge.repartitionBeforeWrite.enabled": "false",
    # A batch without anything new is committed too, as it says how far the table is.
    "spark.databricks.delta.skipRecordingEmptyCommits": "false",
    # How much a task holds of the file that it writes; and its size is looked at from the first row on, not after 100.
    "parquet.block.size": str(16 << 20),
    "parquet.block.size.row.check.min": "1",
    "parquet.page.size.row.check.min": "1",
}
# For a MERGE of more than FEW_ROWS_MAX or FEW_BYTES_MAX. Tasks make rows of Arrow's, and not the driver.
MANY_ROWS = {
    "spark.sql.codegen.wholeStage": "true",
    "spark.sql.adaptive.enabled": "true",
    "spark.sql.execution.arrow.localRelationThreshold": "0",
}
FEW_ROWS_MAX = 10_000
FEW_BYTES_MAX = 4 << 20
COMMIT_METADATA = "spark.databricks.delta.commitInfo.userMetadata"


class Table:
    """The Delta table of a sink, in a Spark session and a database of its own: all sessions of a process share the
    names of tables, and a name that is taken would mean the table of another sink.
    """

    _numbers = itertools.count()
    session: Mapping[str, str] = SESSION
    """Settings of the session."""

    def __init__(self, spark: SparkSession, spec: SinkSpec, schema: str, uri: str) -> None:
        """``schema`` is the SQL of the table; ``uri`` is its location."""
        self._spark = spark.newSession()
        for name, value in self.session.items():
            self._spark.conf.set(name, value)
        self._is_small = True
        self._names = f"lakehouse_{next(self._numbers)}"
        self._sink, self._merge, self._schema, self._uri = spec.name, spec.strategy.select, schema, uri
        self._is_personal = spec.is_personal
        self._jvm: Any = self._spark._jvm

    def require(self) -> None:
        """Find the table that must exist. Raises Failure if it is gone, or differs from what its SQL declares."""
        with self.errors("cannot be read"):
            exists = self.exists()
        if not exists:
            raise Failure(
                f"sink {self._sink}: the table at {self._uri} is gone, and events were applied to it",
                "restore it; or, to fill a new one from what the topic has, delete the sink's rows in `positions` "
                "and its checkpoint",
                code="table-missing",
            )
        self.make()

    def make(self) -> None:
        """Make the table, or compare an existing one with its schema. Raises Failure if they differ."""
        with self.errors("differs from what its SQL declares"), self._alone():
            self._remove_unborn()
            self._spark.sql(f"CREATE DATABASE IF NOT EXISTS {self._names}")
            self._spark.sql(f"USE {self._names}")
            self._spark.sql(self._schema % {"location": literal(self._uri)})

    def exists(self) -> bool:
        """Whether there is a table."""
        files, log = self._log()
        return bool(files.exists(log))

    def events(self) -> DataFrame:
        """The rows of the newest version."""
        return self._spark.read.format("delta").load(self._uri)

    def commit(self, merge: str, said: Mapping[str, Any] | None) -> int:
        """Run a MERGE as one commit, which carries what is ``said``. Returns how many events it has inserted."""
        if said is not None:
            self._spark.conf.set(COMMIT_METADATA, json.dumps(said))
        with self._alone():
            [counted] = self._spark.sql(merge).collect()
        return int(counted["num_inserted_rows"])

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

    def merge(self, rows: pa.Table, metadata: Mapping[str, Any] | None = None, without: Collection[str] = ()) -> int:
        """Merge events, ``without`` those of these ids, in one commit that carries ``metadata``. Returns how many were
        new.

        Raises Failure if that fails; then nothing is merged, unless the JVM is gone.
        """
        if without:
            rows = rows.filter(pc.invert(pc.is_in(rows["event_id"], pa.array([*without], pa.string()))))
        with self.errors("does not take events"):
            is_small = rows.num_rows <= FEW_ROWS_MAX and rows.nbytes <= FEW_BYTES_MAX
            self._tune(is_small=is_small)
            incoming = self._spark.createDataFrame(rows)
            if is_small:
                incoming = incoming.coalesce(1)
            incoming.createOrReplaceTempView("batch")
            said = None if metadata is None else {"sink": self._sink, **metadata}
            inserted = self.commit(self._merge % _bounds(rows["event_id"]), said)
            self._spark.catalog.dropTempView("batch")  # it keeps the rows in memory
            if not is_small:
                # The JVM keeps what py4j's proxies stand for until these are collected, and they are cycles.
                del incoming
                gc.collect()
            return inserted

    def missing(self, event_ids: Collection[str]) -> set[str]:
        """The given events that are not in the table. Like the MERGE this reads files of their days and ids only."""
        if not event_ids:
            return set()
        with self.errors("does not return its events"):
            wanted = pa.table({"event_id": [*event_ids]})
            events = self.events()
            within = "event_id BETWEEN %(first_id)s AND %(last_id)s"
            if "outbox_day" in events.columns:
                within += " AND outbox_day IN (%(days)s)"
            known = events.where(within % _bounds(wanted["event_id"]))
            lacking = self._spark.createDataFrame(wanted).join(known, "event_id", "left_anti")
            return {event_id for (event_id,) in lacking.collect()}

    def _tune(self, *, is_small: bool) -> None:
        """Set the session for a MERGE of few rows or of many."""
        if is_small is self._is_small:
            return
        self._is_small = is_small
        many = {**MANY_ROWS, "spark.sql.shuffle.partitions": str(self._spark.sparkContext.defaultParallelism)}
        for name, value in many.items():
            self._spark.conf.set(name, SESSION[name] if is_small else value)

    @contextmanager
    def _alone(self) -> Iterator[None]:
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

    @contextmanager
    def errors(self, what: str) -> Iterator[None]:
        """Convert errors of Spark and its JVM to Failure."""
        try:
            yield
        except (PySparkException, Py4JError) as error:
            said = kind_of(reason(error)) if self._is_personal else reason(error)
            raise Failure(
                f"sink {self._sink}: the table at {self._uri} {what}: {said}",
                "correct the cause and start the sink again",
                code="table-failed",
            ) from error


def _bounds(event_ids: pa.ChunkedArray) -> dict[str, str]:
    """The days of ids, the first id and the last, as SQL: what bounds a search for events."""
    ends = pc.min_max(event_ids).as_py()
    starts = pc.unique(pc.utf8_slice_codeunits(event_ids, 0, 8)).to_pylist()  # as much as the days depend on
    return {
        "days": ", ".join(f"DATE '{day.isoformat()}'" for day in sorted(days(starts))) or "NULL",
        "first_id": literal(ends["min"] or ""),
        "last_id": literal(ends["max"] or ""),
    }


def literal(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
