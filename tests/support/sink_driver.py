"""Sinks driven without Spark, and what their database holds then."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from psycopg2 import extensions

from outbox.base.database import connect
from outbox.base.settings import Role, Settings, SinkRole
from outbox.sink.postgres.writer import PostgresWriter
from outbox.sink.spec import SinkSpec
from outbox.sink.strategy import Strategy
from outbox.sink.writer import SinkWriter
from tests.support.events import JOB, SPECS

DEDUP = SPECS["dedup"]


def variant(strategy: Strategy, projections: Path | None = None) -> SinkSpec:
    """A sink of a changed strategy, or with other projections."""
    return SinkSpec(JOB if projections is None else replace(JOB, projections=projections), strategy)


def projections_with(folder: Path, name: str, sql: str, *, beside_own: bool = False) -> Path:
    """A folder with this projection; with the job's own too, if asked for."""
    made = folder / f"projections {name}"
    made.mkdir()
    for own in JOB.projections.glob("*.sql") if beside_own else ():
        (made / own.name).write_text(own.read_text())
    (made / f"{name}.sql").write_text(sql)
    return made


@contextmanager
def open_sink(settings: Settings, name: str = "dedup") -> Iterator[SinkWriter]:
    """The writer of a sink, with the fence, until the end of the block."""
    with closing(connect(settings, SinkRole.WRITER)) as connection:
        yield sink_on(connection, SPECS[name])


def sink_on(connection: extensions.connection, spec: SinkSpec = DEDUP) -> SinkWriter:
    """The writer of a sink on a connection."""
    return PostgresWriter(connection, spec)


@dataclass
class Database:
    """What the sink database holds."""

    settings: Settings
    sink: str = "dedup"

    def query(self, sql: str, *parameters: object, role: Role = SinkRole.WRITER) -> list[tuple[object, ...]]:
        """The rows of a query, as the sink's role unless another is given."""
        with closing(connect(self.settings, role)) as connection, connection.cursor() as cursor:
            cursor.execute(sql, parameters or None)
            return list(cursor.fetchall())

    def totals(self) -> dict[str, int]:
        """The total of each key."""
        found = self.query("SELECT key, total FROM sink_totals WHERE sink = %s", self.sink, role=SinkRole.AUDITOR)
        return {str(key): int(str(total)) for key, total in found}

    def positions(self) -> dict[int, int]:
        """The next offset of each partition."""
        found = self.query("SELECT partition, next_offset FROM positions WHERE sink = %s", self.sink)
        return {int(str(partition)): int(str(offset)) for partition, offset in found}

    def processed(self) -> int:
        """How many events are remembered."""
        return int(str(self.query("SELECT count(*) FROM processed_events WHERE sink = %s", self.sink)[0][0]))

    def applied(self) -> int:
        """How many events were applied."""
        return sum(int(str(count)) for (count,) in self.query("SELECT applied FROM sinks WHERE name = %s", self.sink))

    def dead_letters(self) -> dict[str, str]:
        """The reason of each dead letter, by its identity."""
        found = self.query("SELECT identity, reason FROM dead_letters WHERE sink = %s", self.sink)
        return {str(identity): str(reason) for identity, reason in found}

    def statuses(self) -> dict[str, str]:
        """The status of each dead letter, by its identity."""
        found = self.query("SELECT identity, status FROM dead_letters WHERE sink = %s", self.sink)
        return {str(identity): str(status) for identity, status in found}
