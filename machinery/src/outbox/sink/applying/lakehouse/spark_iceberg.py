"""The Iceberg table of a sink in a Spark session, in a catalog whose tables are in the sink database.

Two properties make each MERGE a commit that checks itself. Iceberg remembers the version that the MERGE has read, and
refuses the commit if another one has since added rows to the searched days and ids (`write.merge.isolation-level`).
The MERGE writes no file anew that it only reads (`write.merge.mode`). Compaction adds no rows, so both may run at once.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from outbox.base.errors import Failure
from outbox.sink.applying.lakehouse import iceberg
from outbox.sink.applying.lakehouse.spark_table import Table, literal
from outbox.sink.spec import SinkSpec

CATALOG = f"spark.sql.catalog.{iceberg.CATALOG}"
DECLARED = "spark.sql.catalog.declared"  # in memory: what the table's SQL would make
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
        CATALOG: "org.apache.iceberg.spark.SparkCatalog",
        f"{CATALOG}.type": "jdbc",
        f"{CATALOG}.cache-enabled": "false",  # a table in it may be half a minute old
        f"{CATALOG}.hadoop.fs.file.impl": LOCAL,
        f"{CATALOG}.hadoop.fs.file.impl.disable.cache": "true",
        DECLARED: "org.apache.iceberg.spark.SparkCatalog",
        f"{DECLARED}.catalog-impl": "org.apache.iceberg.inmemory.InMemoryCatalog",
    }

    def __init__(
        self, spark: SparkSession, spec: SinkSpec, schema: str, uri: str, login: Mapping[str, str | int]
    ) -> None:
        """``login`` is that of the sinks' role, as libpq's parameters. The session alone knows it: what Spark starts
        with is on the command line of its JVM.
        """
        super().__init__(spark, spec, schema, uri)
        names = {"user": "user", "password": "password", "sslmode": "sslmode", "sslrootcert": "sslrootcert"}
        names["requireAuth"] = "require_auth"
        options = {name: login[theirs] for name, theirs in names.items() if theirs in login}
        options |= {"currentSchema": "public", "ApplicationName": "outbox", "connectTimeout": 5, "tcpKeepAlive": "true"}
        self._spark.conf.set(f"{CATALOG}.uri", "jdbc:postgresql://{host}:{port}/{dbname}".format(**login))
        self._spark.conf.set(f"{CATALOG}.warehouse", uri)
        for name, value in options.items():
            self._spark.conf.set(f"{CATALOG}.jdbc.{name}", str(value))
        self._namespace = f"{iceberg.CATALOG}.`{spec.name}`"

    def make(self) -> None:
        declared = "declared.declared"
        with self.errors("cannot be made"):
            self._spark.sql(f"CREATE NAMESPACE IF NOT EXISTS {declared}")
            for namespace in (declared, self._namespace):
                self._spark.sql(f"CREATE NAMESPACE IF NOT EXISTS {namespace}")
                self._spark.sql(f"USE {namespace}")
                self._spark.sql(self._schema % {"location": literal(self._uri)})
            lacking = PROPERTIES.items() - dict(self._table().properties()).items()
            if lacking:
                wanted = ", ".join(f"'{name}' = '{value}'" for name, value in sorted(lacking))
                self._spark.sql(f"ALTER TABLE events SET TBLPROPERTIES ({wanted})")
            columns, wanted_columns = (
                {(column.name, column.dataType.simpleString(), column.nullable) for column in table.schema}
                for table in (self.events(), self._spark.table(f"{declared}.events"))
            )
        if different := sorted({name for name, *_ in columns ^ wanted_columns}):
            raise Failure(
                f"sink {self._sink}: the table at {self._uri} differs from what its SQL declares: {different}",
                "correct the SQL, or ALTER TABLE",
                code="table-failed",
            )

    def exists(self) -> bool:
        return bool(self._spark.catalog.tableExists(f"{self._namespace}.events"))

    def commit(self, merge: str, said: Mapping[str, Any] | None) -> int:
        if said is not None:
            self._spark.conf.set(SAID, json.dumps(said))
        self._spark.sql(merge).collect()
        return int(self._table().currentSnapshot().summary().get(INSERTED) or 0)

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
            table = self.events()
            if not {*table.columns} >= {*columns, *(["event_type"] if events else [])}:
                raise Failure(
                    f"sink {self._sink}: its table has no column {', '.join(sorted({*columns} - {*table.columns}))}",
                    "delete the rows of the key yourself, and expire snapshots",
                    code="erase-unsupported",
                )
            condition = " OR ".join(f"CAST(`{column}` AS STRING) = {literal(key)}" for column in sorted(columns))
            if events:
                condition = f"({condition}) AND event_type IN ({', '.join(map(literal, events))})"
            rows, former = table.where(condition).count(), self._in_former_files(condition)
            if (rows or former) and not dry_run:
                self._delete(condition)
            return {f"table of sink {self._sink}": rows, f"former files of the table of sink {self._sink}": former}

    def _table(self) -> Any:
        """The table as an object of Iceberg."""
        load = self._jvm.org.apache.iceberg.spark.Spark3Util.loadIcebergTable
        return load(self._spark._jsparkSession, f"{self._namespace}.events")

    def _in_former_files(self, condition: str) -> int:
        """How many rows that a condition selects are in files that the newest version does not need."""
        if self._table().currentSnapshot() is None:
            return 0
        names = self._spark.table(f"{self._namespace}.events.files").selectExpr(
            "regexp_extract(file_path, '[^/]+$', 0) AS name"
        )
        reader = self._spark.read.schema(self.events().schema).option("recursiveFileLookup", "true")
        found = (
            reader.option("pathGlobFilter", "*.parquet")
            .parquet(self._uri)
            .selectExpr("*", "_metadata.file_name AS name")
        )
        return found.where(condition).join(names, "name", "left_anti").count()

    def _delete(self, condition: str) -> None:
        """Delete rows, and then all that the newest version does not need. It says what the version before it said.

        A commit that has read an earlier version, by a driver that has lost its fence, is refused from here on.
        """
        snapshots = self._spark.table(f"{self._namespace}.events.snapshots")
        said = snapshots.where(f"summary['{iceberg.SAID}'] > ''").orderBy("committed_at").tail(1)
        self._spark.sql(f"DELETE FROM {self._namespace}.events WHERE {condition}")  # noqa: S608
        table = self._table()
        table.newAppend().set(iceberg.SAID, said[0]["summary"][iceberg.SAID] if said else "").commit()
        actions = self._jvm.org.apache.iceberg.spark.actions.SparkActions.get(self._spark._jsparkSession)
        actions.expireSnapshots(table).expireOlderThan(EVER).retainLast(1).execute()
        actions.deleteOrphanFiles(table).olderThan(EVER).execute()
