"""Sinks driven without a query: they apply what their topics have, in the Spark of this process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from outbox.base.database import connect
from outbox.base.settings import Settings, SinkRole
from outbox.kafka import topics
from outbox.kafka.records import Part
from outbox.sink import discovery
from outbox.sink.decoding.records import fetcher
from outbox.sink.repair import replay
from outbox.sink.repair.replay import Replayed, Selection
from outbox.sink.spark.reader import Reader
from outbox.sink.spark.transform import Transform, applier
from outbox.sink.spec import SinkJob, SinkSpec
from outbox.sink.writer import Counts
from tests import transforms
from tests.support.sink_driver import Database

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass
class Sink:
    """A sink with a transform, a function of `tests.transforms`. Each run is a driver of its own."""

    settings: Settings
    spark: SparkSession
    job: SinkJob
    transform: str
    started: Callable[[], object] = lambda: None  # happens when the driver knows the transform

    @property
    def spec(self) -> SinkSpec:
        return discovery.resolve(self.settings, replace(self.job, transform=f"{transforms.__name__}:{self.transform}"))

    @property
    def database(self) -> Database:
        return Database(self.settings, self.job.name)

    def run(self, *, from_start: bool = False) -> Counts:
        """Apply what the topics have, from their start or from where the sink has come to."""
        return run(self.settings, self.spark, self.spec, from_start=from_start, started=self.started)

    def replay(self) -> Replayed:
        """Replay open letters, as the command does."""
        with closing(connect(self.settings, SinkRole.WRITER)) as connection:
            chosen = Selection(sink=self.job.name).choose(connection, with_parked=True)
            applier_of = lambda one: applier(self.settings, one)  # noqa: E731
            found = replay.replay(connection, {self.job.name: self.spec}, chosen, applier_of=applier_of)
            return found.get(self.job.name, Replayed())


def run(
    settings: Settings,
    spark: SparkSession,
    spec: SinkSpec,
    *,
    from_start: bool = False,
    started: Callable[[], object] = lambda: None,
) -> Counts:
    """Apply what the topics have, by a driver of its own. Returns what it was."""
    with ExitStack() as opened:
        connection = opened.enter_context(closing(connect(settings, SinkRole.WRITER)))
        writer = spec.target.writer(settings, connection, spec, fetcher(settings))
        transform = None if spec.job.transform is None else Transform(spark, spec)
        if transform is not None:
            writer.prepare(transform.returned)
        started()
        ids = {topic: topics.describe(settings, topic).id for topic in spec.topics}
        reader = opened.enter_context(closing(Reader(settings, spec, ids, transform)))
        total = Counts()
        for topic in spec.topics:
            end, stored = topics.last_stable_offsets(settings, topic), writer.positions(topic, ids[topic])
            start = dict.fromkeys(end, 0) | ({} if from_start else stored)
            waiting = reader.parts([Part(topic, start, end)])
            while waiting:
                batch = reader.read(spark, waiting)
                total = Counts(*map(sum, zip(total, writer.apply(batch), strict=True)))
        return total
