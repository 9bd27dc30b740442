"""Read a batch that Spark has planned as a range of offsets: a small one in the driver, a large one on executors.

Both read with the client that `outbox check` reads with. In Spark's Kafka source each record passes through the JVM
first: that costs as much as all that comes after it. So the source plans, and its records are left alone.

For a few records, a task of Spark takes longer than the records do. So the driver follows the topic with a consumer of
its own, which has them already. What is large is read and decoded on executors, which stage it
(`outbox.sink.postgres.staging`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pyspark import SparkContext, TaskContext

from outbox.base.settings import Settings, SinkRole
from outbox.kafka.follower import Closed, Follower
from outbox.kafka.records import Within, batches
from outbox.sink.batch import Batch, Staged
from outbox.sink.records import Records
from outbox.sink.spec import SinkSpec
from outbox.sink.writer import Copier, Staging

DRIVER_MAX_RECORDS = 100  # so that a batch of the largest records, of 1 MiB each, fits into the driver's memory
TASK_MIN_RECORDS = 10_000  # fewer are read faster than another task connects to Kafka and to the database


class Reader:
    """Reads the batches of one sink."""

    def __init__(self, settings: Settings, spec: SinkSpec, topic_id: str, staging: Staging | None) -> None:
        """Without ``staging`` the driver decodes large batches too."""
        self._settings = settings
        self._spec = spec
        self._topic_id = topic_id
        self._staging = staging
        self._is_closed = False
        self._follower = Follower(settings, spec.job.topic)

    def read(self, context: SparkContext, start: Mapping[int, int], end: Mapping[int, int]) -> Batch:
        """The records between these offsets, decoded.

        Raises Failure if the driver cannot read them, Spark's errors if executors cannot, Closed.
        """
        job = self._spec.job
        batch = Batch(job.topic, self._topic_id, start, end, job.decoder.rows([], []))
        within = {partition: (start[partition], end[partition]) for partition in sorted(end)}
        if _count(within) <= DRIVER_MAX_RECORDS:
            decoded = job.decoder.decode(Records.of(list(self._follower.read(start, end))))
        elif self._staging is None:
            decoded = job.decoder.decode_parts(self._parts(within))
        else:
            staged = self._stage(context, within, self._staging)
            return replace(batch, staged=staged, traced=staged.traced)
        return replace(batch, **decoded._asdict())

    def close(self) -> None:
        """Leave Kafka, and end a read of the driver. Tasks on executors are Spark's."""
        self._is_closed = True
        self._follower.close()

    def _parts(self, within: Within) -> Iterator[Records]:
        for messages in batches(self._settings, self._spec.job.topic, within, require_all=True):
            if self._is_closed:
                raise Closed
            yield Records.of(messages)

    def _stage(self, context: SparkContext, within: Within, staging: Staging) -> Staged:
        shares = divided(within, context.defaultParallelism)
        task = StagingTask(self._settings, self._spec.job.topic, staging.copier(self._settings.dsn(SinkRole.WRITER)))
        return Staged.together(context.parallelize(shares, len(shares)).mapPartitions(task).collect())


@dataclass(frozen=True)
class StagingTask:
    """What an executor runs: it reads its share of a batch and stages it."""

    settings: Settings
    topic: str
    copier: Copier

    def __call__(self, shares: Iterable[Within]) -> Iterator[Staged]:
        context = TaskContext.get()
        assert context is not None, "executors only"  # noqa: S101
        for within in shares:
            read = map(Records.of, batches(self.settings, self.topic, within, require_all=True))
            # The id of the task's attempt is unique within a Spark session.
            yield self.copier(context.taskAttemptId(), read)


def divided(within: Within, most: int) -> Sequence[Within]:
    """Ranges of offsets in shares of the same size: at most so many, and none of a few records only."""
    total = _count(within)
    size = max(TASK_MIN_RECORDS, -(-total // most))
    shares: list[dict[int, tuple[int, int]]] = [{} for _ in range(0, total, size)]
    passed = 0
    for partition, (first, last) in within.items():
        at = first
        while at < last:
            share, taken = divmod(passed, size)
            until = min(last, at + size - taken)
            shares[share][partition] = (at, until)
            passed += until - at
            at = until
    return shares


def _count(within: Within) -> int:
    return sum(last - first for first, last in within.values())
