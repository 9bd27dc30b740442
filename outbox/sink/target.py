"""Where a sink applies events: the one interface that tables of the sink database and Delta tables implement."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from psycopg2 import extensions

from outbox.base.errors import Failure
from outbox.base.settings import Settings

if TYPE_CHECKING:
    import pyarrow as pa

    from outbox.events.schema import Column
    from outbox.sink.applier import Applier
    from outbox.sink.batch import Returned
    from outbox.sink.spec import SinkSpec
    from outbox.sink.state import TargetState
    from outbox.sink.writer import SinkWriter


Transform = Callable[[str, "pa.Table"], "Returned"]  # what a transform returns of events of a topic


class Target(ABC):
    """The kind of place that a sink's result is kept in. Positions, dead letters and fence are always in the sink
    database.
    """

    jars: Sequence[str] = ()
    """Configurations of ivy.xml that Spark needs beside its Kafka source."""
    spark_config: Mapping[str, str] = {}
    """Settings that the Spark session needs."""

    @abstractmethod
    def writer(self, settings: Settings, connection: extensions.connection, spec: SinkSpec) -> SinkWriter:
        """A writer for a running sink; it acquires the fence. Raises Failure if the sink has a driver already."""

    @abstractmethod
    def applier(self, settings: Settings, spec: SinkSpec, *, dry_run: bool) -> Applier:
        """What applies the events of dead letters in a replay."""

    def transforming_applier(
        self, spec: SinkSpec, returned: Sequence[Column], transform: Transform, *, dry_run: bool
    ) -> Applier:
        """The same for a sink whose transform returns these columns.

        Raises Failure if the target takes no transform.
        """
        del returned, transform, dry_run
        raise no_transform(spec.name)

    def require_rebuildable(self, spec: SinkSpec) -> None:  # noqa: B027 - a result is, unless a target says otherwise
        """Raises Failure if `outbox rebuild` cannot recompute the result."""

    def state(self, settings: Settings, spec: SinkSpec) -> TargetState | None:
        """What the target holds, for `outbox check`; None if that is in the sink database."""
        del settings, spec
        return None


def no_transform(sink: str) -> Failure:
    """The failure of a sink with a transform whose target takes none."""
    return Failure(
        f"sink {sink}: its target takes no transform",
        "leave the transform out, or choose PostgresTarget",
        code="transform-unsupported",
    )
