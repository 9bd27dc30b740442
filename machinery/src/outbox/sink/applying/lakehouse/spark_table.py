"""The table of a sink in a Spark session: it is made, searched for events, and merged into.

`Table` is one of Delta; what another format does in other ways are its methods without an underscore.
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
from pyspark.sql import Column, DataFrame, SparkSession, functions

from outbox.base.errors import Failure, kind_of
from outbox.base.wait import WaitTimeoutError, wait_for
from outbox.sink.applying.lakehouse import table
from outbox.sink.decoding.values import days
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
# Of Iceberg. The catalog is in the sink database.
SPARK_CATALOG = f"spark.sql.catalog.{table.CATALOG}"
SNAPSHOT_SAID = f"spark.sql.iceberg.snapshot-property.{table.SAID}"
INSERTED = "spark.merge-into.num-target-rows-inserted"
# What a MERGE, and an erasure, rely on.
PROPERTIES = {
    "write.merge.mode": "merge-on-read",
    "write.merge.isolation-level": "serializable",
    "write.delete.mode": "copy-on-write",
}
LOCAL = "org.apache.hadoop.fs.LocalFileSystem"  # that of the session does not name its scheme, which Iceberg asks for
EVER = 1 << 62  # later than any time in ms


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


class IcebergTable(Table):
    """An Iceberg table: ``events`` in the namespace that the sink's name is.

    Two properties make each MERGE a commit that checks itself. Iceberg remembers the version that the MERGE has read,
    and refuses the commit if another one has since added rows to the searched days and ids
    (`write.merge.isolation-level`). The MERGE writes no file anew that it only reads (`write.merge.mode`). Compaction
    adds no rows, so both may run at once.
    """

    session: Mapping[str, str] = {
        **SESSION,
        SPARK_CATALOG: "org.apache.iceberg.spark.SparkCatalog",
        f"{SPARK_CATALOG}.type": "jdbc",
        f"{SPARK_CATALOG}.cache-enabled": "false",  # a table in it may be half a minute old
        f"{SPARK_CATALOG}.hadoop.fs.file.impl": LOCAL,
        f"{SPARK_CATALOG}.hadoop.fs.file.impl.disable.cache": "true",
    }

    def __init__(self, spark: SparkSession, spec: SinkSpec, schema: str, uri: str, login: Mapping[str, Any]) -> None:
        """``login`` is that of the sinks' role, as libpq's parameters. The session alone knows it: what Spark starts
        with is on the command line of its JVM.
        """
        super().__init__(spark, spec, schema, uri)
        options = {name: login[name] for name in ("user", "password", "sslmode", "sslrootcert") if name in login}
        options |= {"requireAuth": login["require_auth"]} if "require_auth" in login else {}
        options |= {"currentSchema": "public", "ApplicationName": "outbox", "connectTimeout": 5, "tcpKeepAlive": "true"}
        for name, value in options.items():
            self._spark.conf.set(f"{SPARK_CATALOG}.jdbc.{name}", str(value))
        self._spark.conf.set(f"{SPARK_CATALOG}.uri", "jdbc:postgresql://{host}:{port}/{dbname}".format(**login))
        self._spark.conf.set(f"{SPARK_CATALOG}.warehouse", uri)
        self._namespace = f"{table.CATALOG}.`{spec.name}`"

    def make(self) -> None:
        """Make the table if it does not exist, and give it PROPERTIES."""
        with self.errors("cannot be made"):
            self._spark.sql(f"CREATE NAMESPACE IF NOT EXISTS {self._namespace}")
            self._spark.sql(f"USE {self._namespace}")
            self._spark.sql(self._schema % {"location": literal(self._uri)})
            lacking = PROPERTIES.items() - dict(self._table().properties()).items()
            if lacking:
                wanted = ", ".join(f"'{name}' = '{value}'" for name, value in sorted(lacking))
                self._spark.sql(f"ALTER TABLE events SET TBLPROPERTIES ({wanted})")

    def exists(self) -> bool:
        return bool(self._spark.catalog.tableExists(f"{self._namespace}.events"))

    def commit(self, merge: str, said: Mapping[str, Any] | None) -> int:
        if said is not None:
            self._spark.conf.set(SNAPSHOT_SAID, json.dumps(said))
        self._spark.sql(merge).collect()
        found = self._table()
        snapshot = found.currentSnapshot()
        while INSERTED not in snapshot.summary():  # of compaction, which has come behind the MERGE
            snapshot = found.snapshot(snapshot.parentId())
        return int(snapshot.summary()[INSERTED])

    def events(self) -> DataFrame:
        return self._spark.table(f"{self._namespace}.events")

    def erase(self, columns: Collection[str], key: str, events: Collection[str], *, dry_run: bool) -> dict[str, int]:
        """Delete the rows with a key in one of these columns, of these events if the table has several. Then delete
        former versions, and every file that the newest does not need: time travel ends there. Returns how many rows, by
        place.

        Call it under the sink's lock. Raises Failure if the table has no such column.
        """
        with self.errors("cannot be erased from"):
            if not self.exists():
                return {}
            condition = table.condition(self._sink, self.events().columns, columns, key, events, texts=(literal, "`"))
            rows, former = self.events().where(condition).count(), self._in_former_files(condition)
            if (rows or former) and not dry_run:
                self._delete(condition)
            return table.erased(self._sink, rows, former)

    def _table(self) -> Any:
        """The table as an object of Iceberg."""
        load = self._jvm.org.apache.iceberg.spark.Spark3Util.loadIcebergTable
        return load(self._spark._jsparkSession, f"{self._namespace}.events")

    def _in_former_files(self, condition: str) -> int:
        """How many rows that a condition selects are in files that the newest version does not need."""
        if self._table().currentSnapshot() is None:
            return 0
        names = self._spark.table(f"{self._namespace}.events.files").select(_file_name("file_path"))
        reader = self._spark.read.schema(self.events().schema).option("recursiveFileLookup", "true")
        stored = reader.option("pathGlobFilter", "*.parquet").parquet(self._uri).where(condition)
        return stored.select(_file_name("_metadata.file_path")).join(names, "name", "left_anti").count()

    def _delete(self, condition: str) -> None:
        """Delete rows, and then all that the newest version does not need. It says what the version before it said.

        A commit that has read an earlier version, by a driver that has lost its fence, is refused from here on.
        """
        snapshots = self._spark.table(f"{self._namespace}.events.snapshots")
        said = snapshots.where(f"summary['{table.SAID}'] > ''").orderBy("committed_at").tail(1)
        self._spark.sql(f"DELETE FROM {self._namespace}.events WHERE {condition}")  # noqa: S608
        found = self._table()
        found.newAppend().set(table.SAID, said[0]["summary"][table.SAID] if said else "").commit()
        actions = self._jvm.org.apache.iceberg.spark.actions.SparkActions.get(self._spark._jsparkSession)
        actions.expireSnapshots(found).expireOlderThan(EVER).retainLast(1).execute()
        actions.deleteOrphanFiles(found).olderThan(EVER).execute()


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


def _file_name(path: str) -> Column:
    return functions.regexp_extract(path, "[^/]+$", 0).alias("name")
