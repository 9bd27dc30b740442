"""Sinks driven without Spark, and what their database holds then."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from psycopg2 import extensions

from outbox.base import database
from outbox.base.database import connect
from outbox.base.settings import Role, Settings, SinkRole
from outbox.sink.applying.postgres.target import PostgresTarget, PostgresWriter
from outbox.sink.remembering.strategy import Strategy
from outbox.sink.repair import replay
from outbox.sink.repair.replay import Replayed, Selection
from outbox.sink.spec import SinkSpec
from outbox.sink.writer import SinkWriter
from tests.support.made_events import DECODER, JOB, PROJECTIONS, STRATEGIES, TOPIC, fetch

PROJECTION = next(file.stem for file in sorted(PROJECTIONS.glob("*.sql")) if "." not in file.stem)


@contextmanager
def open_sink(settings: Settings, name: str = "dedup") -> Iterator[PostgresWriter]:
    """The sink of a strategy, with the fence, until the end of the block."""
    with closing(connect(settings, SinkRole.WRITER)) as connection:
        yield sink_on(connection, STRATEGIES[name])


@contextmanager
def driving(settings: Settings, spec: SinkSpec) -> Iterator[SinkWriter]:
    """A sink's writer, with the fence, until the end of the block."""
    with closing(connect(settings, SinkRole.WRITER)) as connection:
        yield spec.target.writer(settings, connection, spec, fetch)


def replayed(
    settings: Settings, spec: SinkSpec, wanted: Selection | None = None, *, with_parked: bool = True, **options: Any
) -> Replayed:
    """Replay a sink's open letters, as the command does."""
    with closing(connect(settings, SinkRole.WRITER)) as connection:
        chosen = replace(wanted or Selection(), sink=spec.name).choose(connection, with_parked=with_parked)
        applier_of = lambda one: one.target.applier(settings, one)  # noqa: E731
        done = replay.replay(connection, {spec.name: spec}, chosen, applier_of=applier_of, **options)
    return done.get(spec.name, Replayed())


def sink_on(
    connection: extensions.connection,
    chosen: Strategy = STRATEGIES["dedup"],
    projections: Path = PROJECTIONS,
    *,
    name: str = "",
) -> PostgresWriter:
    """The sink of a strategy on a connection, called like the strategy unless it has a name. ``projections`` is the
    folder of its projections.
    """
    spec = spec_with(chosen, projections)
    return PostgresWriter(connection, replace(spec, name=name or spec.name), fetch)


def spec_with(chosen: Strategy = STRATEGIES["dedup"], projections: Path = PROJECTIONS) -> SinkSpec:
    """A sink of the events that is called like its strategy, with other projections."""
    job = replace(JOB, name=chosen.name, projections=projections)
    return SinkSpec(chosen.name, job, chosen, {TOPIC: DECODER}, PostgresTarget())


def projections_in(folder: Path, sql: str, name: str = PROJECTION) -> Path:
    """A folder with one projection of this SQL, for strategies that take events and for those that take states."""
    made = folder / f"projections-{uuid.uuid4().hex[:8]}"
    made.mkdir()
    for suffix in (".sql", ".states.sql"):
        (made / f"{name}{suffix}").write_text(sql)
    return made


@dataclass
class Database:
    """The sink database."""

    settings: Settings
    sink: str = "dedup"

    def query(self, sql: str, *parameters: object, role: Role = SinkRole.WRITER) -> list[tuple[object, ...]]:
        """The rows of a query, as the sink's role unless another is given."""
        return database.query(self.settings, role, sql, parameters or None)

    def _of_sink(self, sql: str, *parameters: object) -> list[tuple[Any, ...]]:
        return database.query(self.settings, SinkRole.WRITER, sql, (self.sink, *parameters))

    def totals(self) -> dict[str, int]:
        found = self._of_sink("SELECT key, total FROM sink_totals WHERE sink = %s")
        return {key: int(total) for key, total in found}

    def positions(self, topic: str | None = None) -> dict[int, int]:
        """The next offset of each partition of a topic; of the only one by default."""
        positions = "SELECT partition, next_offset FROM positions WHERE sink = %s AND topic = coalesce(%s, topic)"
        found = self._of_sink(positions, topic)
        assert len(dict(found)) == len(found), "it reads several topics: name one"
        return dict(found)

    def processed(self) -> int:
        """How many events are remembered."""
        [(count,)] = self._of_sink("SELECT count(*) FROM processed_events WHERE sink = %s")
        return int(count)

    def applied(self) -> int:
        """How many events were applied."""
        return sum(count for (count,) in self._of_sink("SELECT applied FROM sinks WHERE name = %s"))

    def dead_letters(self) -> dict[str, str]:
        """The reason of each dead letter, by its identity."""
        return dict(self._of_sink("SELECT identity, reason FROM dead_letters WHERE sink = %s"))

    def statuses(self) -> dict[str, str]:
        """The status of each dead letter, by its identity."""
        return dict(self._of_sink("SELECT identity, status FROM dead_letters WHERE sink = %s"))

    def retries(self, identity: str) -> int:
        """How often a handler has called its function again for the event of a dead letter; 0 without one."""
        found = self._of_sink("SELECT retries FROM dead_letters WHERE sink = %s AND identity = %s", identity)
        return sum(retries for (retries,) in found)

    def discard(self, wanted: Selection | None = None) -> int:
        """Give open letters up, by default all. Returns how many."""
        with closing(connect(self.settings, SinkRole.WRITER)) as connection:
            chosen = replace(wanted or Selection(), sink=self.sink).choose(connection)
            return replay.discard(connection, chosen, because="looked at").get(self.sink, 0)
