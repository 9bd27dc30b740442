"""Sinks driven without a query: they apply what their topics have, in the Spark of this process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

from outbox.base.database import connect
from outbox.base.settings import Settings, SinkRole
from outbox.kafka import topics
from outbox.kafka.records import Part
from outbox.sink.decoding.records import fetcher
from outbox.sink.repair import replay
from outbox.sink.repair.replay import Replayed, Selection
from outbox.sink.spark.reader import Reader
from outbox.sink.spark.transform import Transform, applier
from outbox.sink.spec import SinkSpec
from outbox.sink.writer import Counts

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def run(
    settings: Settings,
    spark: SparkSession,
    spec: SinkSpec,
    *,
    from_start: bool = False,
    started: Callable[[], object] = lambda: None,
) -> Counts:
    """Apply what the topics have, from their start or from where the sink has come to, by a driver of its own. Returns
    what it was. ``started`` is called when the driver knows its transform.
    """
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


def run_replay(settings: Settings, spec: SinkSpec) -> Replayed:
    """Replay the sink's open letters, as the command does."""
    with closing(connect(settings, SinkRole.WRITER)) as connection:
        chosen = Selection(sink=spec.name).choose(connection, with_parked=True)
        found = replay.replay(connection, {spec.name: spec}, chosen, applier_of=lambda one: applier(settings, one))
        return found.get(spec.name, Replayed())
