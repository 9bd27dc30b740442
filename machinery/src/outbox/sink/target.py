"""Where a sink applies events: the one interface that tables of the sink database and Delta tables implement."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from psycopg2 import extensions

from outbox.base.settings import Settings

if TYPE_CHECKING:
    import pyarrow as pa

    from outbox.sink.applier import Applier
    from outbox.sink.batch import Returned
    from outbox.sink.spec import SinkSpec
    from outbox.sink.writer import SinkWriter


class Transformed(NamedTuple):
    """A sink's transform, for a replay: the columns that it returns, and what it returns of events of a topic."""

    schema: pa.Schema
    apply: Callable[[str, pa.Table], Returned]


@dataclass(frozen=True)
class TargetState:
    """What a target outside the sink database holds, in one version of it, as `outbox check` compares it."""

    positions: Mapping[str, Mapping[int, int]] = field(default_factory=dict)  # by topic and partition, the next offset
    totals: Mapping[str, Decimal] = field(default_factory=dict)  # by key
    versions: Mapping[str, int] = field(default_factory=dict)  # by key, the highest applied
    lacking: Callable[[Collection[str]], Collection[str]] = frozenset  # those of these event ids that it does not hold
    unread: str = ""  # why nothing of this is known, if it is not


class Target(ABC):
    """The kind of place that a sink's result is kept in. Positions, dead letters and fence are always in the sink
    database.
    """

    jars: Sequence[str] = ()
    """Configurations of ivy.xml that Spark needs beside its Kafka source."""
    spark_config: Mapping[str, str] = {}
    """Settings that the Spark session needs."""

    def within(self, folder: Path) -> Target:
        """The target of a job in a folder, which relative paths begin at."""
        del folder
        return self

    @abstractmethod
    def writer(self, settings: Settings, connection: extensions.connection, spec: SinkSpec) -> SinkWriter:
        """A writer for a running sink; it acquires the fence. Raises Failure if the sink has a driver already."""

    @abstractmethod
    def applier(
        self, settings: Settings, spec: SinkSpec, transform: Transformed | None = None, *, dry_run: bool
    ) -> Applier:
        """What applies the events of dead letters in a replay. A sink with a transform needs that."""

    def storable(self, spec: SinkSpec, rows: pa.Table) -> pa.Table:
        """Few rows that the sink's transform has returned, as the target takes them.

        Raises ValueError for one that it does not take.
        """
        del spec
        return rows

    def require_rebuildable(self, spec: SinkSpec) -> None:  # noqa: B027 - a result is, unless a target says otherwise
        """Raises Failure if `outbox rebuild` cannot recompute the result."""

    def state(self, settings: Settings, spec: SinkSpec) -> TargetState | None:
        """What the target holds, for `outbox check`; None if that is in the sink database."""
        del settings, spec
        return None
