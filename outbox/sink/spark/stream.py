"""The streaming queries: one a sink, all in one Spark session, each batch handed to the sink's apply.

Spark notes a batch as planned, hands it over, and notes it as committed when we return: sink first, offsets second. A
process that ends in between gets the same offsets again.

A sink that fails ends them all, with one clear line and status 1; a supervisor starts them again. There is no
reconnecting inside: the fence lives in the database connection, and a driver that lost it must not go on.
"""

from __future__ import annotations

import json
import logging
import queue
import re
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import Any, Literal
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc
from psycopg2 import extensions
from py4j.protocol import Py4JError
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from outbox.base import log, trace
from outbox.base.database import connect
from outbox.base.errors import Failure
from outbox.base.settings import Settings, SinkRole
from outbox.base.wait import wait_for
from outbox.kafka import topics
from outbox.sink import positions
from outbox.sink.apply import Driver, Sink
from outbox.sink.batch import Batch
from outbox.sink.dead_letters import DeadLetter
from outbox.sink.job import Declared, Job
from outbox.sink.lakehouse import table as lakehouse_table
from outbox.sink.lakehouse.writer import LakehouseSink
from outbox.sink.metrics import Metrics, served
from outbox.sink.spark import local_checkpoint
from outbox.sink.spark import session as spark_session
from outbox.sink.spark.checkpoint import Checkpoint, Offsets
from outbox.sink.traces import LIMIT as TRACED_LIMIT
from outbox.sink.traces import Traced
from outbox.sink.verdict import UUID as UUID_FORM

POLL_S = 0.2
COMMIT_TIMEOUT_S = 30
NOT_STAGED = ("record", "traceparent")


class Stopping(Exception):
    """Ends a batch that was not begun to be applied when the sink was told to stop."""


def run(settings: Settings, declared: Sequence[Declared], until_caught_up: bool = False) -> None:
    """Run these sinks until SIGTERM or SIGINT, or until all that their topics have committed at the start is applied.

    A batch that is being applied when the signal comes is finished and committed. Raises Failure for the first sink
    that fails, having stopped the others likewise.
    """
    with ExitStack() as resources:
        # The fences first: a second driver is turned away before it touches anything, Spark included.
        sinks = []
        for one in declared:
            connection = resources.enter_context(closing(connect(settings, SinkRole.WRITER)))
            sinks.append(_fenced(settings, connection, one))
        names = {job.topic for job, _ in declared}
        metrics = Metrics()
        resources.enter_context(served(settings, metrics, names))
        ids = {name: topics.describe(settings, name).id for name in names}
        targets = {name: topics.last_stable_offsets(settings, name) for name in names}
        # What we raise through py4j we tell ourselves.
        logging.getLogger("py4j").setLevel(logging.CRITICAL)
        spark = spark_session.session(settings, with_delta=any(job.table for job, _ in declared))
        resources.callback(spark.stop)
        wake = resources.enter_context(_signals())  # after Spark's start, which puts a handler of its own in place
        streams = [
            Stream(
                spark=spark,
                settings=settings,
                job=job,
                topic_id=ids[job.topic],
                start_at=one.start,
                sink=sink,
                metrics=metrics,
                wake=wake,
            )
            for (job, one), sink in zip(declared, sinks, strict=True)
        ]
        try:
            for stream in streams:
                stream.start(until_caught_up)
            _watch(streams, wake)
        finally:
            for stream in streams:
                stream.stop()
        for stream in streams:
            stream.raise_failure()
            if until_caught_up:
                stream.require(targets[stream.topic])


def _fenced(settings: Settings, connection: extensions.connection, declared: Declared) -> Driver:
    job, one = declared
    if job.table is None:
        return Sink(connection, one, job.staged, job.projection)
    return LakehouseSink(connection, one, job.table, lakehouse_table.location(settings, one.name))


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


def _watch(streams: Sequence[Stream], wake: queue.SimpleQueue[None]) -> None:
    """Return when told to stop, when one stream has failed, or when all of them have ended."""
    while True:
        try:
            wake.get(timeout=POLL_S)
        except queue.Empty:
            # In this order: a query that ends in between is seen active, and looked at again.
            active = [stream.is_active() for stream in streams]
            failed = [stream.has_failed() for stream in streams]  # of each, as it keeps what it finds
            if any(failed) or not any(active):
                return
        else:
            return


class Stream:
    """One sink's streaming query."""

    def __init__(
        self,
        *,
        spark: SparkSession,
        settings: Settings,
        job: Job,
        topic_id: str,
        start_at: Literal["positions", "earliest"],
        sink: Driver,
        metrics: Metrics,
        wake: queue.SimpleQueue[None],
    ) -> None:
        self._spark = spark
        self._settings = settings
        self._job = job
        self.topic = job.topic
        self._topic_id = topic_id
        self._start_at = start_at
        self._sink = sink
        self._metrics = metrics
        self._wake = wake
        self._log = log.get(__name__).bind(sink=sink.name)
        self._rewound = sink.beginning(job.topic)
        uri = local_checkpoint.uri(settings, sink.name, self._rewound.generation)
        self._checkpoint = Checkpoint(spark, uri, job.topic)
        self._query: StreamingQuery | None = None
        self._applying = threading.Lock()
        self._stopping = False
        self._failure: BaseException | None = None
        self._last_batch: tuple[int, Offsets] | None = None
        self._reached: Offsets = {}

    def start(self, until_caught_up: bool) -> None:
        """Start the query: where its checkpoint says, or, without one, where the sink's positions say.

        Raises Failure if events before that are lost.
        """
        for file in self._checkpoint.repair():
            self._log.warning("removed a log file that a crash has cut off", file=f"{self._checkpoint.uri}/{file}")
        beginning = self._beginning()
        self._reached = self._checkpoint.applied() or beginning
        starting_offsets = json.dumps({self.topic: {str(key): offset for key, offset in beginning.items()}})
        records = spark_session.records(self._spark, self._settings, self.topic, starting_offsets)
        writer = self._job.decode(records).writeStream.foreachBatch(self._handle).queryName(self._sink.name)
        writer = writer.option("checkpointLocation", self._checkpoint.uri)
        if until_caught_up:
            writer = writer.trigger(availableNow=True)
        self._metrics.started(self._sink.name, self.topic, self._reached)
        self._query = writer.start()
        self._log.info("started", topic=self.topic, checkpoint=self._checkpoint.uri, next_offsets=self._reached)

    def is_active(self) -> bool:
        """Whether the query goes on."""
        return self._query is not None and bool(self._query.isActive)

    def has_failed(self) -> bool:
        """Whether the query ended by an error, be it Spark's own; it is kept for ``raise_failure``."""
        if self._failure is None and not self.is_active():
            error = self._spark_error()
            if error is not None:
                self._failure = Failure(f"sink {self._sink.name}: Spark gave up: {error}", "start the sink again")
        return self._failure is not None

    def stop(self) -> None:
        """Stop between two batches: one that is being applied is finished, and Spark notes it as committed."""
        with self._applying:  # held by the apply
            self._stopping = True
        if self._query is None:
            return
        if self._last_batch is not None and self._failure is None:
            batch_id = self._last_batch[0]
            wait_for(
                f"batch {batch_id} of sink {self._sink.name} to be committed",
                lambda: not self.is_active() or self._checkpoint.is_committed(batch_id),
                timeout_s=COMMIT_TIMEOUT_S,
            )
        self._query.stop()
        self._log.info("stopped", next_offsets=self._reached)

    def raise_failure(self) -> None:
        """Raise what ended the query, if that was an error. One that came of stopping it is none."""
        if self._failure is not None:
            raise self._failure

    def require(self, target: Offsets) -> None:
        """Raises Failure if the sink has not applied everything below these offsets."""
        behind = {key: offset for key, offset in target.items() if self._reached.get(key, 0) < offset}
        if behind:
            raise Failure(
                f"sink {self._sink.name} ended before it had caught up: it is at {self._reached}, not yet at {behind}",
                "start it again",
            )

    def _beginning(self) -> Offsets:
        """Where a query without checkpoint begins, by partition. Raises Failure if events before that are lost."""
        topic, first = self.topic, topics.first_offsets(self._settings, self.topic)
        stored = self._sink.positions(topic, self._topic_id)
        if stored:
            positions.require_no_gap(self._sink.name, topic, stored, first)
        elif not self._checkpoint.exists():
            self._sink.begin_at(topic, self._topic_id, first)
        begin = first if self._start_at == "earliest" else first | stored
        # What the topic has dropped since the rewind cannot be read again.
        return begin | {key: max(offset, first.get(key, 0)) for key, offset in self._rewound.offsets.items()}

    def _handle(self, frame: DataFrame, batch_id: int) -> None:
        """Apply one batch. Whatever it raises ends the query with the batch uncommitted."""
        try:
            self._apply(frame, batch_id)
        except Exception as error:
            if not self._stopping:
                self._failure = error
                self._wake.put(None)
            raise

    def _apply(self, frame: DataFrame, batch_id: int) -> None:
        began = time.monotonic()
        end = self._checkpoint.end(batch_id)
        start = dict.fromkeys(end, 0) | self._start(batch_id)
        table = frame.toArrow()
        read = time.monotonic()
        valid = pc.is_null(table["record"])
        traced, left_out = _traced(table)
        batch = Batch(
            topic=self.topic,
            topic_id=self._topic_id,
            start={partition: start[partition] for partition in end},
            end=end,
            rows=table.filter(valid).drop_columns([name for name in NOT_STAGED if name in table.column_names]),
            dead=[self._dead_letter(row) for row in table.filter(pc.invert(valid)).to_pylist()],
            traced=traced,
            traced_left_out=left_out,
        )
        with self._applying:
            if self._stopping:
                raise Stopping  # returning would let Spark commit what was not applied
            counts = self._sink.apply(batch)
            self._last_batch = (batch_id, end)
            self._reached = end
        read_s, apply_s = read - began, time.monotonic() - read
        self._metrics.applied(self._sink.name, counts, end, read_s, apply_s)
        # Without the lag: it would have to be asked for, which is for the metrics to do.
        self._log.info(
            "applied",
            batch=batch_id,
            **counts._asdict(),
            next_offsets=end,
            read_ms=round(read_s * 1000),
            apply_ms=round(apply_s * 1000),
        )

    def _dead_letter(self, row: dict[str, Any]) -> DeadLetter:
        record, event_id = row["record"], _uuid(row["event_id"])
        key, value, recorded_ms = record["key"], record["value"], round(record["timestamp"].timestamp() * 1000)
        headers = [(header["key"], header["value"]) for header in record["headers"] or ()]
        verdict = self._job.judge.verdict(key, headers, value, recorded_ms)
        return DeadLetter(
            topic=self.topic,
            partition=row["partition"],
            offset=row["offset"],
            key=key,
            headers=headers,
            value=value,
            recorded_ms=recorded_ms,
            event_id=None if event_id is None else UUID(event_id),
            reason=verdict.reason,
            detail=verdict.detail,
        )

    def _start(self, batch_id: int) -> Offsets:
        if self._last_batch is not None and self._last_batch[0] == batch_id - 1:
            return self._last_batch[1]
        return self._checkpoint.start(batch_id)

    def _spark_error(self) -> str | None:
        """Why the query ended, in one line."""
        try:
            error = self._query.exception() if self._query is not None else None
        except Py4JError:
            return "its JVM is gone"
        if error is None:
            return None
        told = re.search(r"terminated with exception: (.*)", str(error))
        return (told[1] if told else str(error)).strip().partition("\n")[0]


def _traced(table: pa.Table) -> tuple[list[Traced], int]:
    """The first records of sampled traces, as many as are told, and how many more there are."""
    if "traceparent" not in table.column_names:
        return [], 0
    places = table.select(["traceparent", "event_id", "partition", "offset"])
    sampled = places.filter(pc.is_valid(places["traceparent"]))
    told = [
        Traced(trace_id, _uuid(row["event_id"]), row["partition"], row["offset"])
        for row in sampled.slice(0, TRACED_LIMIT).to_pylist()
        if (trace_id := trace.trace_id(row["traceparent"])) is not None
    ]
    return told, max(0, sampled.num_rows - TRACED_LIMIT)


def _uuid(text: str | None) -> str | None:
    """A record's id if it is a UUID: those that are set aside may have anything."""
    return text if text is not None and UUID_FORM.fullmatch(text) else None
