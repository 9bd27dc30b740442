"""The streaming query of a sink, in Spark: each batch is handed to the sink's writer.

Spark records a batch as planned, hands it over, and records it as committed when we return: sink first, offsets second.
A process that ends in between gets the same offsets again.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path

from pyspark import inheritable_thread_target
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from outbox.base.errors import Failure
from outbox.base.settings import Settings
from outbox.base.wait import wait_for
from outbox.kafka.clients import spark_options
from outbox.kafka.records import Part
from outbox.sink.decoding.batch import Batch
from outbox.sink.remembering.positions import Beginning, checkpoint_uri
from outbox.sink.running.checkpoint import Checkpoint
from outbox.sink.running.stream import Attempt, Engine, Offsets, Stopping, Stream, replaying
from outbox.sink.spark import session
from outbox.sink.spark.reader import Reader
from outbox.sink.spark.session import JVM_GONE
from outbox.sink.spark.transform import Transform
from outbox.sink.spec import SinkSpec

COMMIT_TIMEOUT_S = 30
GONE = "its JVM is gone"


@contextmanager
def spark_engine(settings: Settings, specs: Sequence[SinkSpec]) -> Iterator[Engine]:
    """Spark, for these sinks, within the block."""
    for handler in logging.getLogger().handlers:
        handler.addFilter(_is_not_py4j)
    spark = session.session(settings, [spec.target for spec in specs])
    try:
        yield partial(Query, spark)
    finally:
        with suppress(*JVM_GONE):
            spark.stop()


def _is_not_py4j(record: logging.LogRecord) -> bool:
    """We report ourselves what we raise through py4j, and that its JVM is gone. It logs to the root logger too."""
    return "py4j" not in Path(record.pathname).parts


class Unapplied(Exception):
    """Spark gets this in place of the error of a batch, which we report ourselves."""


class Query(Stream):
    """One streaming query of a sink."""

    _reader: Reader  # from the start on, as the next three
    _applier: ThreadPoolExecutor
    _checkpoint: Checkpoint
    _rewound: Beginning

    def __init__(self, spark: SparkSession, attempt: Attempt) -> None:
        super().__init__(attempt)
        self._spark = spark
        self._resources = ExitStack()
        self._query: StreamingQuery | None = None
        self._repeats = False  # whether Spark begins with a batch that was not committed
        self._last_batch: int | None = None
        self._next: Offsets = {}  # where the batch after that begins

    def is_active(self) -> bool:
        try:
            return self._query is not None and bool(self._query.isActive)
        except JVM_GONE:
            return False

    def has_failed(self) -> bool:
        if not super().has_failed() and not self.is_active() and (error := self._spark_error()) is not None:
            code = "spark-gone" if error == GONE else "spark-failed"
            self._fail(Failure(f"sink {self._spec.name}: Spark gave up: {error}", "start the sink again", code=code))
        return self.failure is not None

    def has_applied(self) -> bool:
        return self._last_batch is not None

    def must_repeat(self) -> bool:
        return self._repeats and not self.has_applied()

    def _begin(self) -> Offsets:
        """Where the checkpoint says, or, without one that it can continue, where the positions say.

        Raises Failure also if Spark has ended, or if the checkpoint's file system cannot be used.
        """
        self._open()
        start = self._checkpoint.start()
        first, reached = self._positions(start or {})
        problem = self._checkpoint.problem(start, reached)
        if start is not None and problem is None:
            return start
        begin = first if self._spec.strategy.start == "earliest" else reached
        offsets = replaying(start or self._rewound.offsets, first, reached, begin)
        if problem is not None:
            before = self._checkpoint.uri
            while not self._checkpoint.is_new():  # numbers that were used before a backup was restored are passed over
                self._use(self._writer.begin_generation())
            self._log.warning("another checkpoint begins", unusable=before, because=problem, next_offsets=offsets)
        return offsets

    def _open(self) -> None:
        self._require_spark()
        transform = None
        if self._spec.job.transform is not None:
            transform = Transform(self._spark, self._spec)
            self._writer.prepare(transform.returned)
        self._reader = Reader(self._settings, self._spec, self._topic_ids, transform)
        self._resources.enter_context(closing(self._reader))
        # One thread for all batches, because PySpark keeps a thread of the JVM for each that has called it.
        self._applier = ThreadPoolExecutor(1, f"apply {self._spec.name}")
        self._resources.callback(self._applier.shutdown, wait=False)
        self._use(self._writer.beginning())

    def _require_spark(self) -> None:
        with suppress(*JVM_GONE):
            if not self._spark.sparkContext._jsc.sc().isStopped():
                return
        raise Failure(f"sink {self._spec.name}: Spark has ended", "start the sink again", code="spark-gone")

    def _use(self, beginning: Beginning) -> None:
        """Read the checkpoint of a generation."""
        self._rewound = beginning
        uri = checkpoint_uri(self._settings, self._spec.name, beginning.generation)
        self._checkpoint = Checkpoint(self._spark, uri)

    def _run(self, beginning: Offsets, until_caught_up: bool) -> None:
        self._next = beginning
        starting_offsets = json.dumps(
            {topic: {str(key): offset for key, offset in of_topic.items()} for topic, of_topic in beginning.items()}
        )
        options = {
            **spark_options(self._settings),
            "subscribe": ",".join(self._spec.topics),
            "startingOffsets": starting_offsets,  # where there is no checkpoint
            "kafka.isolation.level": "read_committed",
            "failOnDataLoss": "true",
            "maxOffsetsPerTrigger": str(self._settings.sink_max_offsets_per_trigger),
        }
        records = self._spark.readStream.format("kafka").options(**options).load()  # their offsets are wanted
        writer = records.writeStream.foreachBatch(self._handle).queryName(self._spec.name)
        writer = writer.option("checkpointLocation", self._checkpoint.uri)
        if until_caught_up:
            writer = writer.trigger(availableNow=True)
        elif self._settings.sink_trigger_interval_ms:
            writer = writer.trigger(processingTime=f"{self._settings.sink_trigger_interval_ms} milliseconds")
        self._repeats = self._checkpoint.is_pending()
        self._query = writer.start()
        self._log.info("started", topics=self._spec.topics, checkpoint=self._checkpoint.uri, next_offsets=beginning)

    def _end(self) -> None:
        """End the query. Spark records the last batch as committed first."""
        self._resources.close()
        if self._query is not None:
            self.stop_query(self._query)

    def stop_query(self, query: StreamingQuery) -> None:
        if self._last_batch is not None and self.failure is None:
            batch_id = self._last_batch
            wait_for(
                f"batch {batch_id} of sink {self._spec.name} to be committed",
                lambda: not self.is_active() or self._checkpoint.is_committed(batch_id),
                timeout_s=COMMIT_TIMEOUT_S,
            )
        with suppress(PySparkException, *JVM_GONE):
            if query.isActive:
                query.stop()
            else:  # a stop would interrupt what its thread still has to clean up
                query.awaitTermination(COMMIT_TIMEOUT_S)
        self._log.info("stopped", next_offsets=self._reached)

    def _handle(self, _: DataFrame, batch_id: int) -> None:
        """Apply one batch. Whatever it raises ends the query with the batch uncommitted."""
        with self._guard.working(self._writer.connections):
            try:
                self._apply(batch_id)
            except Exception as error:
                if not self.is_stopping:
                    self._fail(error)
                # Spark gets a short error. In the text of one from the JVM it looks for an interruption, with a regular
                # expression that overflows the stack (StreamExecution.isInterruptionException).
                raise Unapplied from None

    def _apply(self, batch_id: int) -> None:
        """Part by part, each in a transaction of its own; the next one is read meanwhile."""
        end = self._checkpoint.end(batch_id)
        waiting = self._reader.parts(_of_topics(self._next, end))
        if not waiting:
            self._last_batch, self._next = batch_id, end
            return
        with suppress(*JVM_GONE):  # what needs the JVM says so
            self._spark.sparkContext.setJobDescription(f"{self._spec.name}: batch {batch_id}")
        batch, read_s = self.read_part(waiting)
        with self.applying, self._failing_at_once():
            if self.is_stopping:
                raise Stopping  # returning would let Spark commit what was not applied
            while waiting:
                # What it runs in Spark belongs to the query, ends with it, and has its description.
                apply = inheritable_thread_target(self._spark)(self.apply_part)
                applied = self._applier.submit(apply, batch_id, batch, read_s)
                try:
                    batch, read_s = self.read_part(waiting)
                finally:
                    applied.result()  # if the apply has failed too, that is what to report
            self.apply_part(batch_id, batch, read_s)
            self._last_batch, self._next = batch_id, end

    def read_part(self, waiting: deque[Part]) -> tuple[Batch, float]:
        """The first of these parts, or what fits into memory of it, and the seconds that it took."""
        began = time.monotonic()
        batch = self._reader.read(self._spark, waiting)
        self._guard.progress()
        return batch, time.monotonic() - began

    def _spark_error(self) -> str | None:
        """Why the query ended, in one line."""
        try:
            error = self._query.exception() if self._query is not None else None
        except JVM_GONE:
            return GONE
        if error is None:
            return None
        found = re.search(r"terminated with exception: (.*)", str(error))
        return (found[1] if found else str(error)).strip().partition("\n")[0]


def _of_topics(start: Offsets, end: Offsets) -> list[Part]:
    """A batch by topic. A partition that is new in it begins at 0."""
    return [
        Part(topic, {partition: start.get(topic, {}).get(partition, 0) for partition in of_topic}, of_topic)
        for topic, of_topic in sorted(end.items())
    ]
