"""The streaming queries: one per sink, all in one Spark session, each batch handed to the sink's writer.

Spark records a batch as planned, hands it over, and records it as committed when we return: sink first, offsets second.
A process that ends in between gets the same offsets again.

A sink that fails is reported at once and stops; its neighbours continue, unless the caller wants them to stop too. The
process then ends with the failure, and a supervisor restarts it. There is no reconnecting inside: the fence lives in
the database connection, and a driver that lost it must not continue.
"""

from __future__ import annotations

import json
import logging
import queue
import re
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

from psycopg2 import extensions
from pyspark import inheritable_thread_target
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from outbox.base import log
from outbox.base.database import connect, hang_up
from outbox.base.errors import Failure
from outbox.base.settings import Settings, SinkRole
from outbox.base.wait import timeout_scale, wait_for
from outbox.kafka import topics
from outbox.sink import positions
from outbox.sink.batch import Batch
from outbox.sink.generations import Beginning, TopicOffsets
from outbox.sink.metrics import Metrics, State, served
from outbox.sink.spark import local_checkpoint
from outbox.sink.spark import session as spark_session
from outbox.sink.spark.checkpoint import Checkpoint, Offsets
from outbox.sink.spark.reader import Part, Reader
from outbox.sink.spark.session import JVM_GONE
from outbox.sink.spec import SinkSpec
from outbox.sink.writer import SinkWriter

POLL_S = 0.2
APPLY_TIMEOUT_S = 60.0  # of a stop, for what is left of a batch
COMMIT_TIMEOUT_S = 30


class Stopping(Exception):
    """Ends a batch whose apply had not begun when the sink was asked to stop."""


def run(
    settings: Settings, specs: Sequence[SinkSpec], *, until_caught_up: bool = False, fail_fast: bool = False
) -> None:
    """Run these sinks until SIGTERM or SIGINT, or until all that their topics have committed at the start is applied.

    A batch that is being applied when the signal arrives is finished and committed. A sink that fails, or cannot start,
    does not stop the others, unless ``fail_fast``. Once all have ended, raises the failure of the first of ``specs``
    that failed.
    """
    with ExitStack() as resources:
        # The fences first: a second driver is refused before it touches anything, Spark included.
        opened = [_open(settings, resources, spec) for spec in specs]
        names = {topic for spec in specs for topic in spec.topics}
        metrics = Metrics()
        for spec in specs:
            metrics.now(spec.name, State.STARTING)
        resources.enter_context(served(settings, metrics, names))
        ids = {name: topics.describe(settings, name).id for name in names}
        targets = {name: topics.last_stable_offsets(settings, name) for name in names}
        for handler in logging.getLogger().handlers:
            handler.addFilter(_is_not_py4j)
        spark = spark_session.session(settings, [spec.job.target for spec in specs])
        resources.callback(spark_session.stop, spark)
        wake = resources.enter_context(_signals())  # after Spark's start, which installs a handler of its own
        streams = [
            Stream(
                spark=spark,
                settings=settings,
                spec=spec,
                topic_ids={topic: ids[topic] for topic in spec.topics},
                connection=connection,
                writer=writer,
                metrics=metrics,
            )
            for spec, (connection, writer) in zip(specs, opened, strict=True)
        ]
        try:
            for stream in streams:
                stream.start(until_caught_up)
                if fail_fast and stream.has_failed():
                    break
            _watch(streams, wake, fail_fast)
        finally:
            for stream in streams:
                stream.begin_no_batch()  # while others are stopped
            for stream in streams:
                stream.stop()
        for stream in streams:
            stream.raise_failure()
        if until_caught_up:
            for stream in streams:
                stream.require(targets)


def _is_not_py4j(record: logging.LogRecord) -> bool:
    """We report ourselves what we raise through py4j, and that its JVM is gone. It logs to the root logger too."""
    return "py4j" not in Path(record.pathname).parts


def _open(settings: Settings, resources: ExitStack, spec: SinkSpec) -> tuple[extensions.connection, SinkWriter]:
    connection = resources.enter_context(closing(connect(settings, SinkRole.WRITER)))
    return connection, spec.job.target.writer(settings, connection, spec)


@contextmanager
def _signals() -> Iterator[queue.SimpleQueue[None]]:
    """A queue that a stop signal puts something into: the one kind of put that is safe in a signal handler."""
    wake: queue.SimpleQueue[None] = queue.SimpleQueue()
    before = {number: signal.signal(number, lambda *_: wake.put(None)) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield wake
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _watch(streams: Sequence[Stream], wake: queue.SimpleQueue[None], fail_fast: bool) -> None:
    """Return when asked to stop, when all streams have ended, or with ``fail_fast`` when one has failed."""
    while True:
        try:
            wake.get(timeout=POLL_S)
        except queue.Empty:
            # In this order: a query that ends in between is seen active, and looked at again.
            active = [stream.is_active() for stream in streams]
            failed = [stream.has_failed() for stream in streams]  # of each, because it keeps what it finds
            if not any(active) or (fail_fast and any(failed)):
                return
        else:
            return


class Stream:
    """One sink's streaming query. A failure of its start, a batch or its stop is reported, and kept to be raised."""

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
    ) -> None:
        self._spark = spark
        self._settings = settings
        self._spec = spec
        self._topic_ids = topic_ids
        self._connection = connection
        self._writer = writer
        self._metrics = metrics
        self._log = log.get(__name__).bind(sink=spec.name)
        self._resources = ExitStack()
        self._query: StreamingQuery | None = None
        self._applying = threading.Lock()
        self._stopping = False
        self._failure: BaseException | None = None
        self._is_reported = False
        self._last_batch: tuple[int, Offsets] | None = None
        self._reached: Offsets = {}

    def start(self, until_caught_up: bool) -> None:
        """Start the query: where its checkpoint says, or, without one, where the sink's positions say.

        The sink fails if its checkpoint cannot be used, or if events before that are lost.
        """
        with self._failing():
            self._open()
            self._start_query(until_caught_up)

    def is_active(self) -> bool:
        """Whether the query is running."""
        try:
            return self._query is not None and bool(self._query.isActive)
        except JVM_GONE:
            return False

    def has_failed(self) -> bool:
        """Whether the query ended by an error, Spark's own included; it is reported once, and kept to be raised."""
        if self._failure is None and not self.is_active():
            error = self._spark_error()
            if error is not None:
                self._failure = Failure(
                    f"sink {self._spec.name}: Spark gave up: {error}", "start the sink again", code="spark-failed"
                )
        self._report()
        return self._failure is not None

    def begin_no_batch(self) -> None:
        """Let no other batch be applied. One that is being applied goes on."""
        self._stopping = True

    def stop(self) -> None:
        """Stop between two batches: one that is being applied is finished, and Spark records it as committed.

        The sink fails if that takes too long, and the apply is ended. Nothing is raised, so that the caller stops the
        others too.
        """
        self.begin_no_batch()
        if self._applying.acquire(timeout=APPLY_TIMEOUT_S * timeout_scale()):
            self._applying.release()
        else:
            self._failure = self._failure or Failure(
                f"sink {self._spec.name} has not applied its batch within {APPLY_TIMEOUT_S:.0f} s of the stop",
                "start the sink again: nothing is lost",
                code="stop-timeout",
            )
            hang_up(self._connection)
            self._report()
        with self._failing():
            self._resources.close()
            if self._query is not None:
                self._stop_query(self._query)

    def raise_failure(self) -> None:
        """Raise what ended the query, if that was an error. An error that came from stopping it is none."""
        if self._failure is not None:
            raise self._failure

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

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Keep what the block raises as the sink's failure, unless it has one already, and report that."""
        try:
            yield
        except Exception as error:
            self._failure = self._failure or error
        self._report()

    def _report(self) -> None:
        if self._failure is not None and not self._is_reported:
            self._is_reported = True
            code = str(getattr(self._failure, "code", "unexpected"))
            self._metrics.now(self._spec.name, State.FAILED, code)
            self._log.error("sink failed", error=str(self._failure), code=code)
            self._connection.close()  # lets another driver take the sink over

    def _open(self) -> None:
        self._reader = Reader(self._settings, self._spec, self._topic_ids, self._writer.staging)
        self._resources.enter_context(closing(self._reader))
        # One thread for all batches, because PySpark keeps a thread of the JVM for each that has called it.
        self._applier = ThreadPoolExecutor(1, f"apply {self._spec.name}")
        self._resources.callback(self._applier.shutdown, wait=False)
        self._use(self._writer.beginning())
        for file in self._checkpoint.repair():
            self._log.warning("truncated log file removed", file=f"{self._checkpoint.uri}/{file}")
        topics_before = self._checkpoint.topics()
        if topics_before and topics_before != {*self._spec.topics}:
            self._begin_again()

    def _use(self, beginning: Beginning) -> None:
        """Read the checkpoint of a generation."""
        self._rewound = beginning
        uri = local_checkpoint.uri(self._settings, self._spec.name, beginning.generation)
        self._checkpoint = Checkpoint(self._spark, uri, self._spec.name)

    def _begin_again(self) -> None:
        """Begin another checkpoint, because Spark continues none whose topics have changed.

        A topic that it had goes on where it has committed: less than the positions say, if it is being replayed.
        """
        committed, begin = self._checkpoint.applied() or self._rewound.offsets, self._begin()
        offsets = {
            topic: {
                partition: committed.get(topic, {}).get(partition, offset) for partition, offset in begin[topic].items()
            }
            for topic in self._spec.topics
        }
        self._use(self._writer.begin_generation(offsets))
        self._log.info("the sink reads other topics: another checkpoint begins", next_offsets=offsets)

    def _start_query(self, until_caught_up: bool) -> None:
        beginning = self._begin()
        self._reached = self._checkpoint.applied() or beginning
        starting_offsets = json.dumps(
            {topic: {str(key): offset for key, offset in of_topic.items()} for topic, of_topic in beginning.items()}
        )
        records = spark_session.records(self._spark, self._settings, self._spec.topics, starting_offsets)
        writer = records.writeStream.foreachBatch(self._handle).queryName(self._spec.name)
        writer = writer.option("checkpointLocation", self._checkpoint.uri)
        if until_caught_up:
            writer = writer.trigger(availableNow=True)
        self._metrics.started(self._spec.name, self._reached)
        self._query = writer.start()
        self._metrics.now(self._spec.name, State.RUNNING)
        self._log.info("started", topics=self._spec.topics, checkpoint=self._checkpoint.uri, next_offsets=self._reached)

    def _stop_query(self, query: StreamingQuery) -> None:
        if self._last_batch is not None and self._failure is None:
            batch_id = self._last_batch[0]
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
        if self._failure is None:
            self._writer.close()
        self._log.info("stopped", next_offsets=self._reached)

    def _begin(self) -> Offsets:
        """Where a query without checkpoint begins. Raises Failure if events before that are lost."""
        return {topic: self._begin_on(topic) for topic in self._spec.topics}

    def _begin_on(self, topic: str) -> dict[int, int]:
        first = topics.first_offsets(self._settings, topic)
        stored = self._writer.positions(topic, self._topic_ids[topic])
        if stored:
            positions.require_no_gap(self._spec.name, topic, stored, first)
        elif topic not in self._checkpoint.topics():
            self._writer.begin_at(topic, self._topic_ids[topic], first)
        begin = first if self._spec.strategy.start == "earliest" else first | stored
        # What the topic has dropped since the rewind cannot be read again.
        rewound = self._rewound.offsets.get(topic, {})
        return begin | {key: max(offset, first.get(key, 0)) for key, offset in rewound.items()}

    def _handle(self, _: DataFrame, batch_id: int) -> None:
        """Apply one batch. Whatever it raises ends the query with the batch uncommitted."""
        try:
            self._apply(batch_id)
        except Exception as error:
            if not self._stopping:
                self._failure = self._failure or error
            raise

    def _apply(self, batch_id: int) -> None:
        """Part by part, each in a transaction of its own; the next one is read meanwhile."""
        end = self._checkpoint.end(batch_id)
        parts = self._reader.parts(_of_topics(self._start(batch_id), end))
        if not parts:
            self._last_batch = (batch_id, end)
            return
        first, *others = parts
        batch, read_s = self._read(first)
        with self._applying, self._failing_at_once():
            if self._stopping:
                raise Stopping  # returning would let Spark commit what was not applied
            for part in others:
                # What it runs in Spark belongs to the query, and ends with it.
                apply = inheritable_thread_target(self._apply_part)
                applied = self._applier.submit(apply, batch_id, batch, read_s)
                try:
                    batch, read_s = self._read(part)
                finally:
                    applied.result()  # if the apply has failed too, that is what to report
            self._apply_part(batch_id, batch, read_s)
            self._writer.clear()
            self._last_batch = (batch_id, end)

    def _read(self, part: Part) -> tuple[Batch, float]:
        """A part, and the seconds that it took."""
        began = time.monotonic()
        return self._reader.read(self._spark.sparkContext, part), time.monotonic() - began

    def _apply_part(self, batch_id: int, batch: Batch, read_s: float) -> None:
        began = time.monotonic()
        with self._failing_at_once():
            counts = self._writer.apply(batch)
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
        """Keep what the block raises, unless it is Stopping: whoever watches or stops the query must see it now."""
        try:
            yield
        except Stopping:
            raise
        except Exception as error:
            self._failure = self._failure or error
            raise

    def _start(self, batch_id: int) -> Offsets:
        if self._last_batch is not None and self._last_batch[0] == batch_id - 1:
            return self._last_batch[1]
        return self._checkpoint.start(batch_id)

    def _spark_error(self) -> str | None:
        """Why the query ended, in one line."""
        try:
            error = self._query.exception() if self._query is not None else None
        except JVM_GONE:
            return "its JVM is gone"
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
