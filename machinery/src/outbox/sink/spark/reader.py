"""Read a batch that Spark has planned as a range of offsets: a small one in the driver, a large one on executors.

Both read with the client that `outbox check` reads with. In Spark's Kafka source each record passes through the JVM
first: that costs as much as all that comes after it. So the source plans, and its records are left alone.

For a few records, a task of Spark takes longer than the records do. So the driver follows the topic with a consumer of
its own, which has them already. What is large is read and decoded on executors, which stage it
(`outbox.sink.postgres.staging`, `outbox.sink.lakehouse.staging`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace

from pyspark import SparkContext, TaskContext

from outbox.base.errors import Failure
from outbox.base.settings import Settings, SinkRole
from outbox.kafka.follower import Closed, Follower
from outbox.kafka.records import batches, size_bytes
from outbox.sink.batch import Batch, Decoded, Staged
from outbox.sink.postgres.transform_staging import TransformStaging
from outbox.sink.records import Records
from outbox.sink.spark import frame
from outbox.sink.spark.part import Part
from outbox.sink.spark.session import JVM_GONE
from outbox.sink.spark.transform import ReadTask, StageTask, Transform, TransformFailed, spark_reason
from outbox.sink.spec import SinkSpec
from outbox.sink.writer import Copier, Staging

DRIVER_MAX_RECORDS = 100  # so that a batch of the largest records, of 1 MiB each, fits into the driver's memory
PART_MAX_RECORDS = 100_000  # a part is read, and staged by executors, while the one before it is applied
# Of the records of a part that the driver decodes: it holds two parts at once, and its JVM some copies of one.
DRIVER_MAX_BYTES = 32 << 20
TASK_MIN_RECORDS = 10_000  # fewer are read faster than another task connects to Kafka and to the database


class Reader:
    """Reads the batches of one sink."""

    def __init__(
        self,
        settings: Settings,
        spec: SinkSpec,
        topic_ids: Mapping[str, str],
        staging: Staging | None,
        transform: Transform | None = None,
    ) -> None:
        """Without ``staging`` the driver decodes large batches too. ``transform`` is that of the sink, if it has one.

        Raises Failure if Kafka is unavailable.
        """
        self._settings = settings
        self._spec = spec
        self._topic_ids = topic_ids
        self._staging = staging
        self._transform = transform
        self._is_closed = False
        self._followers: dict[str, Follower] = {}
        with ExitStack() as opened:
            opened.callback(self.close)
            for topic in spec.topics:
                self._followers[topic] = Follower(settings, topic)
            opened.pop_all()

    def parts(self, of_topics: Sequence[Part]) -> Sequence[Part]:
        """The parts of a batch, each to be applied as a batch of its own. What has no offsets is left out.

        A batch that was planned under a higher maximum of records gets parts of today's.
        """
        most = min(PART_MAX_RECORDS, self._settings.sink_max_offsets_per_trigger)
        return [part for of_topic in of_topics for part in of_topic.in_parts(most)]

    def read(self, context: SparkContext, part: Part) -> Batch:
        """The records of a part, decoded, and what the sink's transform returns of them.

        If the driver has no room for all of them, or if the transform fails for one of many, the batch ends before the
        part: so the caller comes to that event, with few beside it.

        Raises Failure if the driver or a task cannot read or stage them, if Spark cannot run the tasks, or if the
        transform fails for too many of a few events; Closed.
        """
        try:
            return self._read(context, part)
        except TransformFailed:  # of many events
            return self.read(context, part.divided(2)[0])

    def _read(self, context: SparkContext, part: Part) -> Batch:
        batch = Batch(part.topic, self._topic_ids[part.topic], part.start, part.end)
        if part.count <= DRIVER_MAX_RECORDS:
            records = Records.of(list(self._followers[part.topic].read(part.start, part.end)))
            decoded = self._spec.decoders[part.topic].decode(records)
            transform = None if self._transform is None else self._transform.apply
        elif self._staging is None:
            decoded, end = self._decode_here(part)
            batch = replace(batch, end=end)
            transform = None if self._transform is None else self._transform.apply_to_many
        elif self._transform is None:
            staged = self._stage(context, part, self._staging)
            return replace(batch, staged=staged, traced=staged.traced)
        else:
            return self._stage_transformed(part, batch, self._transform)
        if transform is not None:
            events = frame.as_events(self._spec.layout.table(decoded.rows), part.topic)
            batch = replace(batch, returned=transform(events))
        return replace(batch, **decoded._asdict())

    def close(self) -> None:
        """Leave Kafka, and end a read of the driver. Tasks on executors are Spark's."""
        self._is_closed = True
        for follower in self._followers.values():
            follower.close()

    def _decode_here(self, part: Part) -> tuple[Decoded, Mapping[int, int]]:
        """The first records of a part, and up to where they go."""
        decoder, found, bytes_read, reached = self._spec.decoders[part.topic], list[Decoded](), 0, dict(part.start)
        with closing(batches(self._settings, part.topic, part.within, require_all=True)) as read:
            for messages in read:
                if self._is_closed:
                    raise Closed
                found.append(decoder.decode(Records.of(messages)))
                reached |= {message.partition() or 0: (message.offset() or 0) + 1 for message in messages}
                bytes_read += size_bytes(messages)
                if bytes_read >= DRIVER_MAX_BYTES:
                    return Decoded.together(found), reached
        return Decoded.together(found), part.end

    def _stage_transformed(self, part: Part, batch: Batch, transform: Transform) -> Batch:
        staging = self._staging
        assert isinstance(staging, TransformStaging), "of a target that takes a transform"  # noqa: S101
        shares = self._shares(part, transform.context)
        dsn, job = self._settings.dsn(SinkRole.WRITER), staging.next_job()
        settings = self._settings.without_secrets("kafka_password")
        passing = staging.passing_copier(dsn, part.topic, job)
        read = ReadTask(settings, part.topic, self._spec.layout, passing, shares)
        returned = transform.stage(shares, read, StageTask(staging.returned_copier(dsn)))
        staged = staging.passed(dsn, job, len(shares))
        return replace(batch, staged=staged, traced=staged.traced, returned=returned)

    def _shares(self, part: Part, context: SparkContext) -> Sequence[Part]:
        """What each task reads of a part."""
        return part.divided(min(context.defaultParallelism, math.ceil(part.count / TASK_MIN_RECORDS)))

    def _stage(self, context: SparkContext, part: Part, staging: Staging) -> Staged:
        shares = self._shares(part, context)
        task = StagingTask.of(self._settings, part.topic, staging)
        try:
            found = context.parallelize(shares, len(shares)).map(task).collect()
        except JVM_GONE as error:  # Java's errors are among them
            raise Failure(
                f"sink {self._spec.name}: Spark cannot read and stage a batch: {spark_reason(error)}",
                "start the sink again",
                code="spark-failed",
            ) from error
        for one in found:
            if isinstance(one, Failure):
                raise one
        return Staged.together([one for one in found if isinstance(one, Staged)])


@dataclass(frozen=True)
class StagingTask:
    """What an executor runs: it reads its share of a part and stages it."""

    settings: Settings
    topic: str
    copier: Copier

    @classmethod
    def of(cls, settings: Settings, topic: str, staging: Staging) -> StagingTask:
        """The task of a sink. Executors receive the passwords that they need, and no other."""
        return cls(
            settings.without_secrets("kafka_password"), topic, staging.copier(settings.dsn(SinkRole.WRITER), topic)
        )

    def __call__(self, share: Part) -> Staged | Failure:
        """What it has staged, or why it cannot read: Spark would pass on the text of an error only."""
        context = TaskContext.get()
        assert context is not None, "executors only"  # noqa: S101
        read = map(Records.of, batches(self.settings, self.topic, share.within, require_all=True))
        try:
            # The id of the task's attempt is unique within a Spark session.
            return self.copier(context.taskAttemptId(), read)
        except Failure as failure:
            return failure
