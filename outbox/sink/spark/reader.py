"""Read a batch that Spark has planned as a range of offsets: a small one in the driver, a large one on executors.

For a few records, a task of Spark takes longer than the records do. So the driver follows the topic with a consumer of
its own, which has them already. What is large is decoded on executors, which stage it
(`outbox.sink.postgres.staging`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pyspark import TaskContext
from pyspark.sql import DataFrame

from outbox.base.settings import Settings, SinkRole
from outbox.kafka.follower import Follower
from outbox.sink.batch import Batch, Staged
from outbox.sink.postgres.staging import SUMMARY, staged_by
from outbox.sink.records import KAFKA_COLUMNS, as_table
from outbox.sink.spec import SinkSpec
from outbox.sink.writer import Staging

DRIVER_MAX_RECORDS = 100  # so that a batch of the largest records, of 1 MiB each, fits into the driver's memory


class Reader:
    """Reads the batches of one sink."""

    def __init__(self, settings: Settings, spec: SinkSpec, topic_id: str, staging: Staging | None) -> None:
        """Without ``staging`` the driver decodes large batches too."""
        self._settings = settings
        self._spec = spec
        self._topic_id = topic_id
        self._staging = staging
        self._follower = Follower(settings, spec.job.topic)

    def read(self, frame: DataFrame, start: Mapping[int, int], end: Mapping[int, int]) -> Batch:
        """The records between these offsets, decoded. ``frame`` has them too.

        Raises Failure if the driver cannot read them, Spark's errors if executors cannot, Closed.
        """
        job = self._spec.job
        batch = Batch(job.topic, self._topic_id, start, end, job.decoder.rows([], []))
        if sum(end[partition] - start[partition] for partition in end) <= DRIVER_MAX_RECORDS:
            records = as_table(list(self._follower.read(start, end)))
        elif self._staging is None:
            records = frame.select(*KAFKA_COLUMNS).toArrow()
        else:
            staged = self._stage(frame, self._staging)
            return replace(batch, staged=staged, traced=staged.traced)
        return replace(batch, **job.decoder.decode(records)._asdict())

    def close(self) -> None:
        """Leave Kafka, and end the read of a small batch. Tasks on executors are Spark's."""
        self._follower.close()

    def _stage(self, frame: DataFrame, staging: Staging) -> Staged:
        copier = staging.copier(self._settings.dsn(SinkRole.WRITER))
        records = frame.select(*KAFKA_COLUMNS)
        tasks = records.mapInArrow(lambda batches: copier(_attempt(), batches), SUMMARY).collect()
        return staged_by([task.asDict() for task in tasks])


def _attempt() -> int:
    """The id of the task's attempt that runs this; it is unique within a Spark session."""
    context = TaskContext.get()
    assert context is not None, "executors only"  # noqa: S101
    return context.taskAttemptId()
