"""The streaming query of a sink: each batch is handed to the sink's writer.

Spark records a batch as planned, hands it over, and records it as committed when we return: sink first, offsets second.
A process that ends in between gets the same offsets again.

A query that fails is reported at once and stops. There is no reconnecting inside: the fence lives in the database
connection. `outbox.sink.running.supervisor` starts another query, with a connection of its own.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress

from psycopg2 import extensions
from pyspark import inheritable_thread_target
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from outbox.base import log, spans
from outbox.base.database import hang_up, is_cut_off
from outbox.base.errors import Failure
from outbox.base.settings import Settings
from outbox.base.wait import timeout_scale, wait_for
from outbox.kafka import topics
from outbox.kafka.records import Part
from outbox.sink.decoding.batch import Batch
from outbox.sink.frames.transform import Transform
from outbox.sink.reading.reader import Reader
from outbox.sink.remembering import positions
from outbox.sink.remembering.positions import Beginning, TopicOffsets, checkpoint_uri
from outbox.sink.running.checkpoint import Checkpoint, Offsets
from outbox.sink.running.metrics import Metrics
from outbox.sink.running.watchdog import Guard
from outbox.sink.spark import session
from outbox.sink.spark.session import JVM_GONE
from outbox.sink.spec import SinkSpec
from outbox.sink.writer import SinkWriter

APPLY_TIMEOUT_S = 60.0  # of a stop, for what is left of a batch
COMMIT_TIMEOUT_S = 30
GONE = "its JVM is gone"


class Unapplied(Exception):
    """Spark gets this in place of the error of a batch, which we report ourselves."""


class Stopping(Exception):
    """Ends a batch whose apply had not begun when the sink was asked to stop."""


class Stream:
    """One streaming query of a sink. A failure of its start, a batch or its stop is reported, and kept."""

    _reader: Reader  # from the start on, as the next three
    _applier: ThreadPoolExecutor
    _checkpoint: Checkpoint
    _rewound: Beginning

    def __init__(
        self,
        *,
        spark: SparkSession,
        settings: Settings,
        spec: SinkSpec,
        topic_ids: Mapping[str, str],
        connection: extensions.connection,
        writer: SinkWriter,
        metrics: Metrics,
        guard: Guard,
    ) -> None:
        self._spark = spark
        self._settings = settings
        self._spec = spec
        self._topic_ids = topic_ids
        self._connection = connection
        self._writer = writer
        self._metrics = metrics
        self._guard = guard
        self._log = log.get(__name__).bind(sink=spec.name)
        self._resources = ExitStack()
        self._query: StreamingQuery | None = None
        self.applying = threading.Lock()
        self.is_stopping = False
        self._failing = threading.Lock()
        self.failure: BaseException | None = None
        """The error that ended the query, if any. An error that came from stopping the query does not count."""
        self._is_stopped = False
        self._repeats = False  # whether Spark begins with a batch that was not committed
        self._last_batch: int | None = None
        self._next: Offsets = {}  # where the batch after that begins
        self._reached: Offsets = {}

    def start(self, until_caught_up: bool) -> None:
        """Start the query: where its checkpoint says, or, without one that it can continue, where the positions say.

        The sink fails if its checkpoint's file system cannot be used, or if events before that are lost.
        """
        try:
            with self._guard.working(self._connection):
                self._open()
                beginning = self._begin()
            self._start_query(beginning, until_caught_up)  # whose batches are work of their own
        except Exception as error:
            self._fail(error)

    def is_active(self) -> bool:
        """Whether the query is running."""
        try:
            return self._query is not None and bool(self._query.isActive)
        except JVM_GONE:
            return False

    def has_failed(self) -> bool:
        """Whether the query ended by an error, Spark's own included."""
        if self._guard.failure is not None:
            self._fail(self._guard.failure)  # also if what waits cannot be interrupted, as a task of Spark
        if self.failure is None and not self.is_active() and (error := self._spark_error()) is not None:
            code = "spark-gone" if error == GONE else "spark-failed"
            self._fail(Failure(f"sink {self._spec.name}: Spark gave up: {error}", "start the sink again", code=code))
        return self.failure is not None

    def has_applied(self) -> bool:
        """Whether the query has applied a batch, even an empty one."""
        return self._last_batch is not None

    def must_repeat(self) -> bool:
        """Whether it is still to apply a batch that an earlier query of the sink did not get committed."""
        return self._repeats and not self.has_applied()

    def require_topics(self, ids: Mapping[str, str]) -> None:
        """The sink fails if one of these topics, by name their ids, is not the one that it reads."""
        for topic, before in self._topic_ids.items():
            if (now := ids.get(topic, before)) != before:
                unread = f"it had from {self._reached.get(topic, {})} on"
                self._fail(positions.recreated(self._spec.name, topic, before, now, unread))

    def require_connection(self) -> None:
        """A sink that applies nothing at the moment fails if its connection has ended, and its fence with it."""
        if self.failure is None and not self.applying.locked() and is_cut_off(self._connection):
            what = f"sink {self._spec.name}: lost its database connection"
            self._fail(Failure(what, "it connects again", code="database-connection-lost"))

    def begin_no_batch(self) -> None:
        """Let no other batch be applied. One that is being applied goes on."""
        self.is_stopping = True

    def stop(self) -> None:
        """Stop between two batches: one that is being applied is finished, and Spark records it as committed.

        The sink fails if that takes too long, and the apply is ended. Nothing is raised, so that the caller stops the
        others too. It does nothing the second time.
        """
        self.begin_no_batch()
        if self._is_stopped:
            return
        self._is_stopped = True
        if self.failure is None and self.applying.acquire(timeout=APPLY_TIMEOUT_S * timeout_scale()):
            self.applying.release()
        elif self.failure is None:
            what = f"sink {self._spec.name} has not applied its batch within {APPLY_TIMEOUT_S:.0f} s of the stop"
            self._fail(Failure(what, "start the sink again: nothing is lost", code="stop-timeout"))
        try:
            with self._guard.working(self._connection):
                self._resources.close()
                if self._query is not None:
                    self.stop_query(self._query)
        except Exception as error:
            self._fail(error)

    def require(self, targets: TopicOffsets) -> None:
        """Raises Failure if the sink has not applied everything on its topics below these offsets."""
        behind = {
            f"{topic}/{partition}": offset
            for topic in self._spec.topics
            for partition, offset in targets[topic].items()
            if self._reached.get(topic, {}).get(partition, 0) < offset
        }
        if behind:
            raise Failure(
                f"sink {self._spec.name} ended before it had caught up: it is at {self._reached}, not yet at {behind}",
                "start it again",
                code="sink-behind",
            )

    def _fail(self, error: Exception) -> None:
        """Keep and report why the sink fails: the first reason, and of a connection that was hung up the reason for
        that.
        """
        with self._failing:
            if self.failure is not None:
                return
            self.failure = error = self._guard.failure or error
        # The text of an error that is not ours may repeat personal data.
        hides = self._spec.is_personal and not isinstance(error, Failure)
        self._log.error("sink failed", error=type(error).__name__ if hides else str(error), code=code_of(error))
        hang_up(self._connection)  # ends what is applied, and lets another driver take the sink over

    def _open(self) -> None:
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

    def _use(self, beginning: Beginning) -> None:
        """Read the checkpoint of a generation."""
        self._rewound = beginning
        uri = checkpoint_uri(self._settings, self._spec.name, beginning.generation)
        self._checkpoint = Checkpoint(self._spark, uri)

    def _begin(self) -> Offsets:
        """Where the first batch begins. Raises Failure, with nothing changed, if events before that are lost."""
        start = self._checkpoint.start()
        first = {topic: topics.first_offsets(self._settings, topic) for topic in self._spec.topics}
        stored = {topic: self._writer.positions(topic, self._topic_ids[topic]) for topic in self._spec.topics}
        # A topic that is new to the checkpoint may be new to the sink.
        new = [topic for topic in self._spec.topics if not stored[topic] and topic not in (start or {})]
        for topic in self._spec.topics:
            if topic not in new:
                positions.require_no_gap(self._spec.name, topic, stored[topic], first[topic])
        self._writer.begin()
        for topic in new:
            self._writer.begin_at(topic, self._topic_ids[topic], first[topic])
        reached = {topic: first[topic] | stored[topic] for topic in self._spec.topics}
        problem = self._checkpoint.problem(start, reached)
        if start is not None and problem is None:
            return start
        replayed = start or self._rewound.offsets
        begin = first if self._spec.strategy.start == "earliest" and problem is None else reached
        offsets = {
            topic: begin[topic] | _to_replay(replayed.get(topic, {}), first[topic], reached[topic])
            for topic in self._spec.topics
        }
        if problem is not None:
            self._begin_another(problem, offsets)
        return offsets

    def _begin_another(self, problem: str, offsets: Offsets) -> None:
        """Let another checkpoint begin there. Numbers that were used before a backup was restored are passed over."""
        before = self._checkpoint.uri
        while not self._checkpoint.is_new():
            self._use(self._writer.begin_generation())
        self._log.warning("another checkpoint begins", unusable=before, because=problem, next_offsets=offsets)

    def _start_query(self, beginning: Offsets, until_caught_up: bool) -> None:
        self._reached = self._next = beginning
        starting_offsets = json.dumps(
            {topic: {str(key): offset for key, offset in of_topic.items()} for topic, of_topic in beginning.items()}
        )
        records = session.records(self._spark, self._settings, self._spec.topics, starting_offsets)
        writer = records.writeStream.foreachBatch(self._handle).queryName(self._spec.name)
        writer = writer.option("checkpointLocation", self._checkpoint.uri)
        if until_caught_up:
            writer = writer.trigger(availableNow=True)
        elif self._settings.sink_trigger_interval_ms:
            writer = writer.trigger(processingTime=f"{self._settings.sink_trigger_interval_ms} milliseconds")
        self._metrics.started(self._spec.name, self._reached)
        self._repeats = self._checkpoint.is_pending()
        self._query = writer.start()
        self._log.info("started", topics=self._spec.topics, checkpoint=self._checkpoint.uri, next_offsets=self._reached)

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
        with self._guard.working(self._connection):
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
        waiting = deque(self._reader.parts(_of_topics(self._next, end)))
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
        """The first of these parts, and the seconds that it took. What did not fit into memory waits on."""
        began = time.monotonic()
        part = waiting.popleft()
        batch = self._reader.read(self._spark.sparkContext, part)
        self._guard.progress()
        rest = part.behind(batch.end)
        if rest.count:
            waiting.appendleft(rest)
        return batch, time.monotonic() - began

    def apply_part(self, batch_id: int, batch: Batch, read_s: float) -> None:
        began = time.monotonic()
        chunk = batch.chunk
        span = spans.batch(self._spec.name, batch.topic, chunk.count + chunk.dead_count, chunk.sampled)
        with self._failing_at_once(), span as counted:
            counts = self._writer.apply(batch)
            counted.update(counts._asdict())
        self._guard.progress()
        apply_s = time.monotonic() - began
        self._reached = {**self._reached, batch.topic: {**self._reached.get(batch.topic, {}), **batch.end}}
        self._metrics.applied(self._spec.name, counts, self._reached, read_s, apply_s)
        # Without the lag, which Kafka would have to be asked for: the metrics do that.
        self._log.info(
            "applied",
            batch=batch_id,
            **counts._asdict(),
            topic=batch.topic,
            next_offsets=dict(batch.end),
            read_ms=round(read_s * 1000),
            apply_ms=round(apply_s * 1000),
        )

    @contextmanager
    def _failing_at_once(self) -> Iterator[None]:
        """Keep what the block raises, unless it is Stopping: threads that watch or stop the query must see it now."""
        try:
            yield
        except Stopping:
            raise
        except Exception as error:
            self._fail(error)
            raise

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


def code_of(error: BaseException) -> str:
    """The code of a Failure; of another error, that nobody has expected it."""
    return str(getattr(error, "code", "unexpected"))


def _of_topics(start: Offsets, end: Offsets) -> list[Part]:
    """A batch by topic. A partition that is new in it begins at 0."""
    return [
        Part(topic, {partition: start.get(topic, {}).get(partition, 0) for partition in of_topic}, of_topic)
        for topic, of_topic in sorted(end.items())
    ]


def _to_replay(offsets: dict[int, int], first: dict[int, int], reached: dict[int, int]) -> dict[int, int]:
    """Where the partitions of a topic are read again: not above the positions, and only what the topic still has."""
    return {
        partition: max(first.get(partition, 0), min(offset, reached.get(partition, offset)))
        for partition, offset in offsets.items()
    }
