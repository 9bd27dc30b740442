"""Read a batch that Spark has planned as a range of offsets: a small one in the driver, a large one on executors.

Both read with the client that `outbox check` reads with. In Spark's Kafka source each record passes through the JVM
first: that costs as much as all that comes after it. So the source plans, and its records are left alone.

For a few records, a task of Spark takes longer than the records do. So the driver follows the topic with a consumer of
its own, which has them already. What is large is read by tasks. Both make chunks of it
(`outbox.sink.decoding.batch`), and tasks return theirs to the driver. Spark returns a task's result once, whatever
attempts there were.

A part is bounded in records, and its chunk in bytes: a task ends its share early, and what lies behind it belongs to
the next part. While a transform has the events of a part, tasks read the next one.
"""

from __future__ import annotations

import math
import pickle
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import NamedTuple

import pyarrow as pa
from confluent_kafka import KafkaException
from pyspark import inheritable_thread_target
from pyspark.sql import SparkSession

from outbox.base.errors import Failure
from outbox.base.settings import Settings
from outbox.events.schema import shortened
from outbox.kafka.follower import Follower
from outbox.kafka.records import Part, batches, bounded
from outbox.sink.decoding.batch import Batch, Chunk, Chunking, Reached
from outbox.sink.decoding.records import Records
from outbox.sink.spark.session import JVM_GONE
from outbox.sink.spark.transform import Transform, TransformFailed, as_events, spark_reason
from outbox.sink.spec import SinkSpec

DRIVER_MAX_RECORDS = 100  # so that a batch of the largest records, of 1 MiB each, fits into the driver's memory
PART_MAX_RECORDS = 100_000  # a part is read while the one before it is applied
PART_MAX_BYTES = 32 << 20  # of a chunk: the driver holds up to three parts at once, and its JVM some copies of one
TASK_MIN_RECORDS = 10_000  # fewer are read faster than another task connects to Kafka
COMPRESSION = "lz4"  # of what passes through Spark: two JVMs and three sockets copy each byte some ten times

Taken = tuple[Chunk, Mapping[int, int]]  # the first records of a part, and where they end


class Reader:
    """Reads the batches of one sink."""

    def __init__(
        self, settings: Settings, spec: SinkSpec, topic_ids: Mapping[str, str], transform: Transform | None = None
    ) -> None:
        """``transform`` is that of the sink, if it has one. Raises Failure if Kafka is unavailable."""
        self._settings = settings
        self._spec = spec
        self._topic_ids = topic_ids
        self._transform = transform
        # Records that are expected to fit. Nobody knows how wide the rows are that a transform returns.
        self._most = PART_MAX_RECORDS if transform is None else TASK_MIN_RECORDS
        self._knows_width = False
        self._ahead: tuple[Part, Future[Taken]] | None = None  # what tasks read while the transform runs
        self._chunkings = {topic: spec.chunking(topic) for topic in spec.topics}
        self._followers: dict[str, Follower] = {}
        self._thread = ThreadPoolExecutor(1, f"read {spec.name}")
        with ExitStack() as opened:
            opened.callback(self.close)
            for topic in spec.topics:
                self._followers[topic] = Follower(settings, topic)
            opened.pop_all()

    def parts(self, of_topics: Sequence[Part]) -> deque[Part]:
        """The parts of a batch, each to be applied as a batch of its own. What has no offsets is left out.

        A batch that was planned under a higher maximum of records gets parts of today's.
        """
        most = min(PART_MAX_RECORDS, self._settings.sink_max_offsets_per_trigger)
        return deque(part for of_topic in of_topics for part in of_topic.in_parts(most))

    def read(self, spark: SparkSession, waiting: deque[Part]) -> Batch:
        """The records of the first of these parts as a chunk, and what the sink's transform returns of its events.

        The part is taken away. If the driver has no room for all of it, the rest waits on. If the transform fails for
        one of many events, halves of the part wait: so the caller comes to that event, with few beside it.

        Raises Failure if the driver or a task cannot read them, if Spark cannot run the tasks, or if the transform
        fails for too many of a few events; Closed.
        """
        part = waiting.popleft()
        is_small = part.count <= DRIVER_MAX_RECORDS
        chunk, end = self._read_here(part) if is_small else self._take(spark, part)
        rest = part.behind(end)
        if rest.count:
            waiting.appendleft(rest)
        returned = None
        if self._transform is not None:
            if waiting and not is_small:
                self._read_ahead(spark, waiting[0])
            transform = self._transform.apply if is_small else self._transform.apply_to_many
            try:
                returned = transform(as_events(chunk.frame, part.topic))
            except TransformFailed:  # of many events
                failed = Part(part.topic, part.start, end)
                waiting.extendleft(reversed(failed.in_parts(math.ceil(failed.count / 2))))
                return self.read(spark, waiting)
        batch = Batch(part.topic, self._topic_ids[part.topic], part.start, end, chunk, returned)
        if not is_small:
            self._expect(batch)
        return batch

    def close(self) -> None:
        """Leave Kafka, and end a read of the driver. Tasks on executors are Spark's."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        for follower in self._followers.values():
            follower.close()

    def _read_here(self, part: Part) -> Taken:
        # One by one: a record may have 100,000 headers, which need a hundred times its memory in Python.
        messages = ([message] for message in self._followers[part.topic].read(part.start, part.end))
        read = map(Records.of_messages, bounded(messages, DRIVER_MAX_RECORDS))
        chunk, reached = self._chunkings[part.topic].first(read, PART_MAX_BYTES)
        return chunk, part.end if reached is None else {**part.start, **reached}

    def _read_ahead(self, spark: SparkSession, part: Part) -> None:
        """Let tasks read the part that is next, once it is known how much fits."""
        if self._knows_width and part.count > DRIVER_MAX_RECORDS:
            read = inheritable_thread_target(spark)(self._read_by_tasks)  # its tasks end with the query
            self._ahead = part, self._thread.submit(read, spark, part)

    def _take(self, spark: SparkSession, part: Part) -> Taken:
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == part:
            return ahead[1].result()
        return self._read_by_tasks(spark, part)

    def _read_by_tasks(self, spark: SparkSession, part: Part) -> Taken:
        """The chunk of the first records of a part, and where it ends. What is behind a share that has ended early is
        read again.
        """
        part, context = part.first(min(part.count, self._most)), spark.sparkContext
        shares = part.divided(min(context.defaultParallelism, math.ceil(part.count / TASK_MIN_RECORDS)))
        task = ReadTask.of_sink(self._settings, self._chunkings[part.topic], part.topic, PART_MAX_BYTES // len(shares))
        try:
            results = context.parallelize(shares, len(shares)).map(task).collect()
        except JVM_GONE as error:  # Java's errors are among them
            raise Failure(
                f"sink {self._spec.name}: Spark cannot read a batch: {spark_reason(error, self._spec)}",
                "start the sink again",
                code="spark-failed",
            ) from error
        chunks, end = list[Chunk](), part.start
        for share, result in zip(shares, results, strict=True):
            if isinstance(result, Failure):
                raise result
            chunks.append(result.chunk)
            if result.reached is not None:
                end = {**end, **result.reached}
                break
            end = share.end
        return Chunk.together(chunks), end

    def _expect(self, batch: Batch) -> None:
        """Let the next parts have as many records as fit, by the bytes of this one, but grow no faster than twofold."""
        returned = 0 if batch.returned is None else batch.returned.rows.nbytes
        size_bytes = max(batch.chunk.size_bytes, returned, 1)
        fit = Part(batch.topic, batch.start, batch.end).count * PART_MAX_BYTES // size_bytes
        self._most = max(1, min(2 * self._most, fit, PART_MAX_RECORDS))
        self._knows_width = True


class Read(NamedTuple):
    """The result of a task: its chunk, compressed, and where that ends if the task's share goes on behind it."""

    compressed: bytes
    size_bytes: int
    reached: Reached | None

    @classmethod
    def of_chunk(cls, chunk: Chunk, reached: Reached | None) -> Read:
        """A chunk that is to pass through Spark."""
        content = pickle.dumps(chunk, pickle.HIGHEST_PROTOCOL)
        return cls(pa.compress(content, COMPRESSION, asbytes=True), len(content), reached)

    @property
    def chunk(self) -> Chunk:
        """The chunk."""
        found: Chunk = pickle.loads(pa.decompress(self.compressed, self.size_bytes, COMPRESSION))  # noqa: S301 - ours
        return found


@dataclass(frozen=True)
class ReadTask:
    """The function that an executor runs on its share of a part."""

    settings: Settings
    chunking: Chunking
    topic: str
    max_bytes: int

    @classmethod
    def of_sink(cls, settings: Settings, chunking: Chunking, topic: str, max_bytes: int) -> ReadTask:
        """The task of a sink. Executors receive Kafka's password and no other."""
        return cls(settings.without_secrets("kafka_password"), chunking, topic, max_bytes)

    def __call__(self, share: Part) -> Read | Failure:
        """Read the share. A Failure is returned, because Spark would pass on the text of an error only."""
        try:
            at_once = self.chunking.decoder.at_once
            with closing(batches(self.settings, self.topic, share.within, at_least=at_once, require_all=True)) as read:
                return Read.of_chunk(*self.chunking.first(map(Records.of_messages, read), self.max_bytes))
        except Failure as failure:
            return failure
        except (KafkaException, OSError, MemoryError):
            raise  # Spark runs the task again
        except Exception as error:  # of a decoder of the project's own
            return Failure(
                f"a task cannot read {self.topic}: {shortened(repr(error))}", "correct it", code="unexpected"
            )
