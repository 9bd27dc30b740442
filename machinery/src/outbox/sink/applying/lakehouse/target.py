"""The targets in a lakehouse: a table of events, merged by id, of Delta or of Iceberg.

Each needs jars of its format, and `outbox check` the package that reads it: `deltalake`, `pyiceberg`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from outbox.base.database import login
from outbox.base.heavy import extensions
from outbox.base.sections import COMMENT
from outbox.base.settings import Settings, SinkRole
from outbox.sink.applying.lakehouse import table
from outbox.sink.decoding.records import Fetch
from outbox.sink.spec import SinkSpec, Target, TargetState, Transformed, unusable

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from outbox.sink.applying.lakehouse.spark_table import IcebergTable, Table
    from outbox.sink.writer import Applier, SinkWriter

CHECKED = re.compile(r"\bWHEN\s+MATCHED\b", re.IGNORECASE)


class LakehouseTarget(Target):
    """A Delta table. ``schema`` is the file with the statement that makes it; ``totals`` is a query over it, by key its
    total and version, that nothing but `outbox check` runs.
    """

    is_elsewhere = True
    keeps = "log of a Delta table, with the extremes of its columns: for delta.logRetentionDuration (30 days)"
    engines: Collection[str] = ("spark",)
    rebuilt_from: Collection[str] = ()
    not_rebuilt = (
        "is a table of events, and its totals are a query: there is nothing to recompute",
        "`outbox rewind {} --to-earliest` reads what the topic still has",
    )
    jars: Sequence[str] = ("lakehouse",)
    # How many tasks of a commit read the log; the default is 50. One is faster than two, also with 50,000 files.
    spark_config: Mapping[str, str] = {
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        "spark.databricks.delta.snapshotPartitions": "1",
    }

    read_by = staticmethod(table.delta)

    def __init__(self, schema: Path, totals: Path) -> None:
        self._schema = schema
        self._totals = totals

    def within(self, folder: Path) -> LakehouseTarget:
        return type(self)(folder / self._schema, folder / self._totals)

    def opened(self, settings: Settings, spec: SinkSpec, spark: SparkSession) -> Table:
        """The sink's table in a session."""
        from outbox.sink.applying.lakehouse.spark_table import Table

        return Table(spark, spec, self._schema.read_text(), table.location(settings, spec.name))

    def writer(self, settings: Settings, connection: extensions.connection, spec: SinkSpec, fetch: Fetch) -> SinkWriter:
        from outbox.sink.applying.lakehouse.writer import LakehouseWriter

        return LakehouseWriter(connection, spec, fetch, partial(self.opened, settings, spec))

    def applier(self, settings: Settings, spec: SinkSpec, transform: Transformed | None = None) -> Applier:
        """Raises Failure if the table is gone, or differs from what its SQL declares."""
        from outbox.sink.applying.lakehouse.writer import LakehouseApplier
        from outbox.sink.spark.session import session

        found = self.opened(settings, spec, session(settings, [self]))
        found.require()
        return LakehouseApplier(spec, lambda: found, None if transform is None else transform.apply)

    def erase(self, settings: Settings, spec: SinkSpec, topic: str, key: str, *, dry_run: bool) -> Mapping[str, int]:
        columns, names = _places(spec, topic)
        return table.erase(settings, spec.name, columns, key, names, dry_run=dry_run)

    def state(self, settings: Settings, spec: SinkSpec) -> TargetState:
        return table.read(settings, spec.name, self._totals, self.read_by)


class IcebergTarget(LakehouseTarget):
    """An Iceberg table, in a catalog that the sink database keeps: `outbox.migrations.make_iceberg_catalog` makes it.

    ``schema`` and ``totals`` are as of a Delta table. The MERGE has a clause WHEN MATCHED, which may never be true.
    """

    jars: Sequence[str] = ("iceberg",)
    spark_config: Mapping[str, str] = {}
    read_by = staticmethod(table.iceberg)

    def opened(self, settings: Settings, spec: SinkSpec, spark: SparkSession) -> IcebergTable:
        from outbox.sink.applying.lakehouse.spark_table import IcebergTable

        uri = table.location(settings, spec.name)
        return IcebergTable(spark, spec, self._schema.read_text(), uri, login(settings, SinkRole.WRITER))

    def require_usable(self, spec: SinkSpec) -> None:
        """Iceberg appends what a MERGE without the clause inserts, and looks for nothing that was added meanwhile."""
        if CHECKED.search(COMMENT.sub("", spec.strategy.select)) is None:
            problem = f"the MERGE of {spec.strategy.name} only inserts, and Iceberg commits that unchecked"
            raise unusable(spec.job, problem, "write `WHEN MATCHED AND FALSE THEN DELETE` before WHEN NOT MATCHED")

    def erase(self, settings: Settings, spec: SinkSpec, topic: str, key: str, *, dry_run: bool) -> Mapping[str, int]:
        from outbox.sink.spark.session import session

        columns, names = _places(spec, topic)
        found = self.opened(settings, spec, session(settings, [self]))
        return found.erase(columns, key, names, dry_run=dry_run)


def _places(spec: SinkSpec, topic: str) -> tuple[set[str], list[str]]:
    """The columns that the key of a topic's events is in, and their names if the table has several."""
    decoder = spec.decoders[topic]
    columns = {spec.layout.place(event, decoder.key) for event in decoder.types}
    return columns, [*decoder.types] if spec.layout.has_types else []
