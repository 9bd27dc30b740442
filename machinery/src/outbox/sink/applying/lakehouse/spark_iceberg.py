"""The Iceberg table of a sink in a Spark session, in a catalog whose tables are in the sink database.

Two properties make each MERGE a commit that checks itself. Iceberg remembers the version that the MERGE has read, and
refuses the commit if another one has since added rows to the searched days and ids (`write.merge.isolation-level`).
The MERGE writes no file anew that it only reads (`write.merge.mode`). Compaction adds no rows, so both may run at once.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from pyspark.sql import Column, DataFrame, SparkSession, functions

from outbox.sink.applying.lakehouse import iceberg, table
from outbox.sink.applying.lakehouse.spark_table import SESSION, Table, literal
from outbox.sink.spec import SinkSpec

CATALOG = f"spark.sql.catalog.{iceberg.CATALOG}"
SAID = f"spark.sql.iceberg.snapshot-property.{iceberg.SAID}"
INSERTED = "spark.merge-into.num-target-rows-inserted"
# What a MERGE, and an erasure, rely on.
PROPERTIES = {
    "write.merge.mode": "merge-on-read",
    "write.merge.isolation-level": "serializable",
    "write.delete.mode": "copy-on-write",
}
LOCAL = "org.apache.hadoop.fs.LocalFileSystem"  # that of the session does not name its scheme, which Iceberg asks for
EVER = 1 << 62  # later than any time in ms


class IcebergTable(Table):
    """An Iceberg table: ``events`` in the namespace that the sink's name is."""

    session: Mapping[str, str] = {
        **SESSION,
        CATALOG: "org.apache.iceberg.spark.SparkCatalog",
        f"{CATALOG}.type": "jdbc",
        f"{CATALOG}.cache-enabled": "false",  # a table in it may be half a minute old
        f"{CATALOG}.hadoop.fs.file.impl": LOCAL,
        f"{CATALOG}.hadoop.fs.file.impl.disable.cache": "true",
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
            self._spark.conf.set(f"{CATALOG}.jdbc.{name}", str(value))
        self._spark.conf.set(f"{CATALOG}.uri", "jdbc:postgresql://{host}:{port}/{dbname}".format(**login))
        self._spark.conf.set(f"{CATALOG}.warehouse", uri)
        self._namespace = f"{iceberg.CATALOG}.`{spec.name}`"

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
            self._spark.conf.set(SAID, json.dumps(said))
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
        said = snapshots.where(f"summary['{iceberg.SAID}'] > ''").orderBy("committed_at").tail(1)
        self._spark.sql(f"DELETE FROM {self._namespace}.events WHERE {condition}")  # noqa: S608
        found = self._table()
        found.newAppend().set(iceberg.SAID, said[0]["summary"][iceberg.SAID] if said else "").commit()
        actions = self._jvm.org.apache.iceberg.spark.actions.SparkActions.get(self._spark._jsparkSession)
        actions.expireSnapshots(found).expireOlderThan(EVER).retainLast(1).execute()
        actions.deleteOrphanFiles(found).olderThan(EVER).execute()


def _file_name(path: str) -> Column:
    return functions.regexp_extract(path, "[^/]+$", 0).alias("name")
