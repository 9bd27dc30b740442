"""The table of a sink in a Spark session: it is made, searched for events, and merged into.

The formats differ in how a table is made, opened and named, and in how a commit says something of its own:
`spark_delta`, `spark_iceberg`.
"""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from outbox.base.errors import Failure, kind_of
from outbox.sink.decoding.ids import days
from outbox.sink.spark.session import FEW_ROWS, reason
from outbox.sink.spec import SinkSpec

SESSION = {
    **FEW_ROWS,
    "spark.sql.adaptive.enabled": "false",  # it plans again after each stage, which takes longer than few rows do
    "spark.sql.shuffle.partitions": "1",
    "spark.sql.execution.arrow.localRelationThreshold": "48MB",
}
# For a MERGE of more than FEW_ROWS_MAX or FEW_BYTES_MAX. Tasks make rows of Arrow's, and not the driver.
MANY_ROWS = {
    "spark.sql.codegen.wholeStage": "true",
    "spark.sql.adaptive.enabled": "true",
    "spark.sql.execution.arrow.localRelationThreshold": "0",
}
FEW_ROWS_MAX = 10_000
FEW_BYTES_MAX = 4 << 20


class Table(ABC):
    """The table of a sink, in a Spark session of its own."""

    session: Mapping[str, str] = {}
    """Settings of the session that the format needs."""

    def __init__(self, spark: SparkSession, spec: SinkSpec, schema: str, uri: str) -> None:
        """``schema`` is the SQL of the table; ``uri`` is its location."""
        self._spark = spark.newSession()
        for name, value in {**SESSION, **self.session}.items():
            self._spark.conf.set(name, value)
        self._is_small = True
        self._sink, self._merge, self._schema, self._uri = spec.name, spec.strategy.select, schema, uri
        self._is_personal = spec.is_personal
        self._jvm: Any = self._spark._jvm

    @abstractmethod
    def make(self) -> None:
        """Make the table, or compare an existing one with its schema. Raises Failure if they differ."""

    @abstractmethod
    def exists(self) -> bool:
        """Whether there is a table."""

    @abstractmethod
    def commit(self, merge: str, said: Mapping[str, Any] | None) -> int:
        """Run a MERGE as one commit that carries what is ``said``. Returns how many events it has inserted."""

    @abstractmethod
    def events(self) -> DataFrame:
        """The rows of the newest version."""

    def alone(self) -> AbstractContextManager[None]:
        """A block within which no other process writes, for a format whose commits do not exclude each other."""
        return nullcontext()

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
            with self.alone():
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
    return {
        "days": ", ".join(f"DATE '{day.isoformat()}'" for day in sorted(days(event_ids))) or "NULL",
        "first_id": literal(ends["min"] or ""),
        "last_id": literal(ends["max"] or ""),
    }


def literal(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
