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
from itertools import pairwise

from pyspark import SparkContext, TaskContext

from outbox.base.settings import Settings, SinkRole
from outbox.kafka.follower import Closed, Follower
from outbox.kafka.records import Within, batches
from outbox.sink.batch import Batch, Staged
from outbox.sink.records import Records
from outbox.sink.spec import SinkSpec
from outbox.sink.writer import Copier, Staging

DRIVER_MAX_RECORDS = 100  # so that a batch of the largest records, of 1 MiB each, fits into the driver's memory
PART_MAX_RECORDS = 100_000  # a part is staged while the one before it is applied
TASK_MIN_RECORDS = 10_000  # fewer are read faster than another task connects to Kafka and to the database
Part = tuple[Mapping[int, int], Mapping[int, int]]  # by partition its first offset, and the one after its last


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

    def parts(self, start: Mapping[int, int], end: Mapping[int, int]) -> Sequence[Part]:
        """The batch between these offsets in parts, each a batch of its own; at least one."""
        whole = (start, end)
        return [whole] if self._staging is None else divided(whole, max(1, -(-_count(whole) // PART_MAX_RECORDS)))

    def read(self, context: SparkContext, part: Part) -> Batch:
        """The records of a part, decoded.

        Raises Failure if the driver cannot read them, Spark's errors if executors cannot, Closed.
        """
        job, (start, end) = self._spec.job, part
        batch = Batch(job.topic, self._topic_id, start, end, job.decoder.rows([], []))
        if _count(part) <= DRIVER_MAX_RECORDS:
            decoded = job.decoder.decode(Records.of(list(self._follower.read(start, end))))
        elif self._staging is None:
            decoded = job.decoder.decode_parts(self._read_here(part))
        else:
            staged = self._stage(context, part, self._staging)
            return replace(batch, staged=staged, traced=staged.traced)
        return replace(batch, **decoded._asdict())

    def close(self) -> None:
        """Leave Kafka, and end a read of the driver. Tasks on executors are Spark's."""
        self._is_closed = True
        self._follower.close()

    def _read_here(self, part: Part) -> Iterator[Records]:
        for messages in batches(self._settings, self._spec.job.topic, _within(part), require_all=True):
            if self._is_closed:
                raise Closed
            yield Records.of(messages)

    def _stage(self, context: SparkContext, part: Part, staging: Staging) -> Staged:
        tasks = min(context.defaultParallelism, -(-_count(part) // TASK_MIN_RECORDS))
        shares = [_within(share) for share in divided(part, tasks)]
        task = StagingTask.of(self._settings, self._spec.job.topic, staging)
        return Staged.together(context.parallelize(shares, len(shares)).mapPartitions(task).collect())


@dataclass(frozen=True)
class StagingTask:
    """What an executor runs: it reads its share of a part and stages it."""

    settings: Settings
    topic: str
    copier: Copier

    @classmethod
    def of(cls, settings: Settings, topic: str, staging: Staging) -> StagingTask:
        """The task of a sink. Executors receive the passwords that they need, and no other."""
        return cls(settings.without_secrets("kafka_password"), topic, staging.copier(settings.dsn(SinkRole.WRITER)))

    def __call__(self, shares: Iterable[Within]) -> Iterator[Staged]:
        context = TaskContext.get()
        assert context is not None, "executors only"  # noqa: S101
        for within in shares:
            read = map(Records.of, batches(self.settings, self.topic, within, require_all=True))
            # The id of the task's attempt is unique within a Spark session.
            yield self.copier(context.taskAttemptId(), read)


def divided(whole: Part, count: int) -> Sequence[Part]:
    """Ranges of offsets in so many parts, one after the other, each with the same share of every partition."""
    start, end = whole
    cuts = [
        {partition: start[partition] + (end[partition] - start[partition]) * number // count for partition in end}
        for number in range(count + 1)
    ]
    return list(pairwise(cuts))


def _count(part: Part) -> int:
    start, end = part
    return sum(end[partition] - start[partition] for partition in end)


def _within(part: Part) -> Within:
    start, end = part
    return {partition: (start[partition], end[partition]) for partition in end}
