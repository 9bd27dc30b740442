"""One attempt of a sink to run: batches of its topics go to its writer, until it is stopped or fails.

What all attempts share is here: where they begin, how a batch is applied and reported, how they fail and stop. What
plans and reads the batches is an engine: Spark (`outbox.sink.running.query`), or this process alone
(`outbox.sink.running.plain`).

An attempt that fails is reported at once and stops. There is no reconnecting inside: the fence lives in the database
connection. `outbox.sink.running.supervisor` begins another one, with a connection of its own.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from psycopg2 import extensions

from outbox.base import log, spans
from outbox.base.database import hang_up, is_cut_off
from outbox.base.errors import Failure
from outbox.base.settings import Settings
from outbox.base.wait import timeout_scale
from outbox.kafka import topics
from outbox.sink.decoding.batch import Batch
from outbox.sink.remembering import positions
from outbox.sink.remembering.positions import TopicOffsets
from outbox.sink.running.metrics import Metrics
from outbox.sink.running.watchdog import Guard
from outbox.sink.spec import SinkSpec
from outbox.sink.writer import SinkWriter

APPLY_TIMEOUT_S = 60.0  # of a stop, for what is left of a batch

Offsets = dict[str, dict[int, int]]  # by topic and partition


class Stopping(Exception):
    """Ends a batch whose apply had not begun when the sink was asked to stop."""


class Attempt(NamedTuple):
    """One attempt of a sink: its connection, which has the fence, and what looks after it."""

    settings: Settings
    spec: SinkSpec
    topic_ids: Mapping[str, str]
    connection: extensions.connection
    writer: SinkWriter
    metrics: Metrics
    guard: Guard


class Stream(ABC):
    """One attempt of a sink. A failure of its start, a batch or its stop is reported, and kept."""

    def __init__(self, attempt: Attempt) -> None:
        self._settings, self._spec, self._topic_ids, self._connection, *_ = attempt
        self._writer, self._metrics, self._guard = attempt.writer, attempt.metrics, attempt.guard
        self._log = log.get(__name__).bind(sink=self._spec.name)
        self.applying = threading.Lock()
        self.is_stopping = False
        self._failing = threading.Lock()
        self.failure: BaseException | None = None
        """The error that ended the stream, if any. An error that came from stopping the stream does not count."""
        self._is_stopped = False
        self._reached: Offsets = {}

    def start(self, until_caught_up: bool) -> None:
        """Start to apply batches. The sink fails if events before the first one are lost."""
        try:
            with self._guard.working(self._writer.connections):
                beginning = self._begin()
            self._reached = beginning
            self._metrics.started(self._spec.name, beginning)
            self._run(beginning, until_caught_up)  # whose batches are work of their own
        except Exception as error:
            self._fail(error)

    @abstractmethod
    def _begin(self) -> Offsets:
        """Where the first batch begins. Raises Failure, with nothing changed, if events before that are lost."""

    @abstractmethod
    def _run(self, beginning: Offsets, until_caught_up: bool) -> None:
        """Begin to read and to apply, in other threads."""

    @abstractmethod
    def _end(self) -> None:
        """End what `_run` has begun. No batch is being applied, unless the sink has failed."""

    @abstractmethod
    def is_active(self) -> bool:
        """Whether it reads and applies."""

    @abstractmethod
    def has_applied(self) -> bool:
        """Whether it has applied a batch, even an empty one."""

    @abstractmethod
    def must_repeat(self) -> bool:
        """Whether it is still to apply what an earlier attempt may have failed at."""

    def has_failed(self) -> bool:
        """Whether it ended by an error."""
        if self._guard.failure is not None:
            self._fail(self._guard.failure)  # also if what waits cannot be interrupted, as a task of Spark
        return self.failure is not None

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
        """Stop between two batches: one that is being applied is finished.

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
            with self._guard.working(self._writer.connections):
                self._end()
        except Exception as error:
            self._fail(error)

    def require(self, targets: TopicOffsets) -> None:
        """Raises Failure if the sink has not applied everything on its topics below these offsets."""
        if behind := self._behind(targets):
            raise Failure(
                f"sink {self._spec.name} ended before it had caught up: it is at {self._reached}, not yet at {behind}",
                "start it again",
                code="sink-behind",
            )

    def _behind(self, targets: TopicOffsets) -> dict[str, int]:
        """The targets of the sink's topics that it has not reached."""
        return {
            f"{topic}/{partition}": offset
            for topic in self._spec.topics
            for partition, offset in targets[topic].items()
            if self._reached.get(topic, {}).get(partition, 0) < offset
        }

    def _fail(self, error: BaseException) -> None:
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
        for connection in self._writer.connections:
            hang_up(connection)  # ends what is applied, and lets another driver take the sink over

    def _positions(self, known: TopicOffsets) -> tuple[Offsets, Offsets]:
        """The first offsets that the topics have, and those that the sink has reached. A topic without a position that
        is not ``known`` is new: it begins at its first offset.

        Raises Failure, with nothing changed, if the topics have dropped events that were not applied.
        """
        first = {topic: topics.first_offsets(self._settings, topic) for topic in self._spec.topics}
        stored = {topic: self._writer.positions(topic, self._topic_ids[topic]) for topic in self._spec.topics}
        new = [topic for topic in self._spec.topics if not stored[topic] and topic not in known]
        for topic in self._spec.topics:
            if topic not in new:
                positions.require_no_gap(self._spec.name, topic, stored[topic], first[topic])
        self._writer.begin()
        starts = {topic: first[topic] for topic in new}
        if self._spec.target.begin == "latest" and not any(stored.values()):
            starts = {topic: topics.last_stable_offsets(self._settings, topic) for topic in new}
        self._writer.begin_at(starts, self._topic_ids)
        return first, {topic: first[topic] | starts.get(topic, {}) | stored[topic] for topic in self._spec.topics}

    def apply_part(self, batch_id: int, batch: Batch, read_s: float) -> None:
        """Apply a batch, or a part of one, and report it."""
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
        """Keep what the block raises, unless it is Stopping: threads that watch or stop the stream must see it now."""
        try:
            yield
        except Stopping:
            raise
        except Exception as error:
            self._fail(error)
            raise


Engine = Callable[[Attempt], Stream]
"""Makes the stream of an attempt, which is not started yet."""


def code_of(error: BaseException) -> str:
    """The code of a Failure; of another error, that nobody has expected it."""
    return str(getattr(error, "code", "unexpected"))


def replaying(offsets: TopicOffsets, first: Offsets, reached: Offsets, begin: Offsets) -> Offsets:
    """``begin``, but partitions with one of these offsets are read again from there: not above the positions that are
    reached, and only what the topic still has.
    """
    return {
        topic: of_topic
        | {
            partition: max(first[topic].get(partition, 0), min(offset, reached[topic].get(partition, offset)))
            for partition, offset in offsets.get(topic, {}).items()
        }
        for topic, of_topic in begin.items()
    }
