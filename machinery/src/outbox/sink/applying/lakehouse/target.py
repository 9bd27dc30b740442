"""The target in a lakehouse: a Delta table of events, merged by id. Needs jars of Delta; `check` needs `deltalake`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from outbox.base.errors import Failure
from outbox.base.heavy import extensions
from outbox.base.settings import Settings
from outbox.sink.applying.lakehouse import table
from outbox.sink.decoding.records import Fetch
from outbox.sink.spec import SinkSpec, Target, TargetState, Transformed

if TYPE_CHECKING:
    from outbox.sink.writer import Applier, SinkWriter


class LakehouseTarget(Target):
    """A Delta table. ``schema`` is the file with the statement that makes it; ``totals`` is a query over it, by key its
    total and version, that nothing but `outbox check` runs.
    """

    is_elsewhere = True
    keeps = "log of a Delta table, with the extremes of its columns: for delta.logRetentionDuration (30 days)"
    engines: Collection[str] = ("spark",)
    jars: Sequence[str] = ("lakehouse",)
    # How many tasks of a commit read the log; the default is 50. One is faster than two, also with 50,000 files.
    spark_config: Mapping[str, str] = {
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        "spark.databricks.delta.snapshotPartitions": "1",
    }

    def __init__(self, schema: Path, totals: Path) -> None:
        self._schema = schema
        self._totals = totals

    def within(self, folder: Path) -> LakehouseTarget:
        return LakehouseTarget(folder / self._schema, folder / self._totals)

    def writer(self, settings: Settings, connection: extensions.connection, spec: SinkSpec, fetch: Fetch) -> SinkWriter:
        from outbox.sink.applying.lakehouse.writer import LakehouseWriter

        return LakehouseWriter(connection, spec, fetch, self._schema, table.location(settings, spec.name))

    def applier(self, settings: Settings, spec: SinkSpec, transform: Transformed | None = None) -> Applier:
        """Raises Failure if the table is gone, or differs from what its SQL declares."""
        from outbox.sink.applying.lakehouse.spark_table import Table
        from outbox.sink.applying.lakehouse.writer import LakehouseApplier
        from outbox.sink.spark.session import session

        uri = table.location(settings, spec.name)
        found = Table(session(settings, [self]), spec, self._schema.read_text(), uri)
        found.require()
        return LakehouseApplier(spec, found, None if transform is None else transform.apply)

    def require_rebuildable(self, spec: SinkSpec, source: str) -> None:
        del source
        raise Failure(
            f"sink {spec.name} is a table of events, and its totals are a query: there is nothing to recompute",
            f"`outbox rewind {spec.name} --to-earliest` reads what the topic still has",
            code="rebuild-unsupported",
        )

    def erase(self, settings: Settings, spec: SinkSpec, topic: str, key: str, *, dry_run: bool) -> Mapping[str, int]:
        decoder = spec.decoders[topic]
        columns = {spec.layout.place(event, decoder.key) for event in decoder.types}
        names = [*decoder.types] if spec.layout.has_types else []
        return table.erase(settings, spec.name, columns, key, names, dry_run=dry_run)

    def state(self, settings: Settings, spec: SinkSpec) -> TargetState:
        return table.read(settings, spec.name, self._totals)
