"""A sink in this process alone, without Spark: one thread reads and decodes, another one applies.

A plain sink has no checkpoint. The positions, which each batch moves in its transaction, say where it continues. Where
Spark has run the sink before, Spark's checkpoint stays behind the positions; so each plain start begins another
generation, and Spark would begin at the positions again.

A rewind stores from where the sink reads again, up to the positions of its start. If the process ends before, the next
start reads all of that once more.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import closing, contextmanager
from itertools import count

from outbox.base.database import connect
from outbox.base.errors import Failure
from outbox.base.settings import Settings, SinkRole
from outbox.base.wait import in_thread, timeout_scale
from outbox.kafka import topics
from outbox.kafka.follower import Tail
from outbox.sink.decoding.batch import Batch, Chunk
from outbox.sink.decoding.records import Records
from outbox.sink.remembering.positions import TopicOffsets
from outbox.sink.repair.replay import Selection, replay
from outbox.sink.running.stream import Attempt, Engine, Offsets, Stream, replaying
from outbox.sink.spec import SinkSpec
from outbox.sink.writer import Due

POLL_S = 0.1  # for a stop, and for a failure of the other thread
PART_MAX_RECORDS = 50_000  # a part is read while the one before it is applied
PART_MAX_BYTES = 16 << 20  # of a chunk: two of them are in memory, and what their records take in Python
APPLY_MAX_S = 1.0  # of a sink whose transactions take few records
FIRST_RECORDS = 10  # of such a sink, which may be slow: a stop waits for its batch
END_TIMEOUT_S = 30.0  # of a stop, for a read that waits for Kafka


@contextmanager
def plain_engine(settings: Settings, specs: Sequence[SinkSpec]) -> Iterator[Engine]:
    """This process, for sinks that do not need Spark."""
    del settings, specs
    yield Plain


class Plain(Stream):
    """One attempt of a sink, in two threads of this process."""

    _tail: Tail
    _thread: threading.Thread

    def __init__(self, attempt: Attempt) -> None:
        super().__init__(attempt)
        self._chunkings = {topic: self._spec.chunking(topic) for topic in self._spec.topics}
        self._replays_to: TopicOffsets | None = None  # while what a rewind has asked for is read
        self._target: TopicOffsets = {}  # what the topics had at the start
        self._ends_there = False
        self._next: Offsets = {}  # where the next batch begins
        self._has_applied = False
        self._is_replaying = True  # and there may be more to replay
        self._is_begun = False
        few, most = self._spec.target.records_max, min(PART_MAX_RECORDS, self._settings.sink_max_offsets_per_trigger)
        self._most, self._records_max = (FIRST_RECORDS, few) if few else (most, most)

    def is_active(self) -> bool:
        return self._is_begun and self._thread.is_alive()

    def has_applied(self) -> bool:
        return self._has_applied

    def must_repeat(self) -> bool:
        return not self._has_applied

    def _begin(self) -> Offsets:
        """Where the positions say, or before, if a rewind has set where."""
        first, reached = self._positions({})
        rewound = self._writer.beginning().offsets
        self._writer.begin_generation()
        self._replays_to = reached if rewound else None
        return replaying(rewound, first, reached, begin=reached)

    def _run(self, beginning: Offsets, until_caught_up: bool) -> None:
        self._next, self._ends_there = beginning, until_caught_up
        self._target = {topic: topics.last_stable_offsets(self._settings, topic) for topic in self._spec.topics}
        self._tail = Tail(self._settings, beginning)
        self._thread = threading.Thread(target=self._follow, name=f"read {self._spec.name}", daemon=True)
        self._thread.start()
        self._is_begun = True
        self._log.info("started", topics=self._spec.topics, next_offsets=beginning)

    def _end(self) -> None:
        if not self._is_begun:
            return
        self._thread.join(END_TIMEOUT_S * timeout_scale())
        if self._thread.is_alive():
            raise Failure(
                f"sink {self._spec.name} has not left Kafka within {END_TIMEOUT_S:.0f} s of the stop",
                "start the sink again: nothing is lost",
                code="stop-timeout",
            )
        self._log.info("stopped", next_offsets=self._reached)

    def _follow(self) -> None:
        """Read what comes; apply it in another thread while the next is read."""
        applied: Future[None] | None = None
        try:
            for number in count():
                batches, read_s = self._read()
                if applied is not None:
                    self._await(applied)
                    if self.failure is None:
                        applied.result()
                is_done = self._ends_there and not self._behind(self._target) and not self._is_replaying
                if is_done or self.is_stopping or self.failure is not None:
                    return
                applied = in_thread(f"apply {self._spec.name}", self._apply, number, batches, read_s)
        except BaseException as error:  # of any kind: a handler may have raised it, and a thread ends without a word
            if not self.is_stopping:
                self._fail(error)
        finally:
            if applied is not None:
                self._await(applied)
            self._tail.close()

    def _await(self, applied: Future[None]) -> None:
        """Wait for an apply, but not once the sink has failed: a function that it calls may never return."""
        while self.failure is None and not wait([applied], POLL_S).done:
            pass

    def _read(self) -> tuple[Sequence[Batch], float]:
        """What there is, by topic, and the seconds that it took to decode it. None of the batches is empty."""
        chunks: dict[str, list[Chunk]] = {topic: [] for topic in self._spec.topics}
        records = size_bytes = 0
        read_s = 0.0
        for by_topic in self._tail.read(POLL_S, self._most):
            began = time.monotonic()
            for topic, messages in by_topic.items():
                chunk = self._chunkings[topic].chunk(Records.of_messages(messages))
                chunks[topic].append(chunk)
                records, size_bytes = records + len(messages), size_bytes + chunk.size_bytes
            read_s += time.monotonic() - began
            if records >= self._most or size_bytes >= PART_MAX_BYTES:
                break
        reached = self._tail.reached()
        # A marker behind the last record is passed with the next ones, or when nothing else is to be done. A sink that
        # is to end does not wait for that.
        is_due = self._ends_there or not records
        moved = [topic for topic, end in reached.items() if end != self._next[topic] and (chunks[topic] or is_due)]
        batches = [
            Batch(
                topic,
                self._topic_ids[topic],
                {partition: self._next[topic].get(partition, 0) for partition in reached[topic]},
                reached[topic],
                Chunk.together(chunks[topic] or [Chunk()]),
            )
            for topic in moved
        ]
        self._next = {**self._next, **{topic: reached[topic] for topic in moved}}
        return batches, read_s

    def _apply(self, number: int, batches: Sequence[Batch], read_s: float) -> None:
        with self.applying, self._failing_at_once():
            if self.is_stopping:
                return
            began = time.monotonic()
            with self._guard.working(self._writer.connections):
                for batch in batches:
                    self.apply_part(number, batch, read_s)
                if self._replays_to is not None and not self._behind(self._replays_to):
                    self._writer.begin_generation(is_replayed=True)
                    self._replays_to = None
                due = self._writer.due(self._most)
            self._replay(due)
            self._is_replaying = bool(due.letters)
            self._expect(time.monotonic() - began)
            self._has_applied = self._has_applied or bool(batches) or not self._behind(self._target)

    def _replay(self, due: Due) -> None:
        """Replay these dead letters, with what waits behind them, on a connection that has tables of its own."""
        if not due.letters:
            return
        connected = closing(connect(self._settings, SinkRole.WRITER))
        with connected as connection, self._guard.working([connection]):
            chosen = Selection(sink=self._spec.name, identities=due.letters).choose(connection)
            applier_of = lambda spec: spec.target.applier(self._settings, spec)  # noqa: E731
            replay(connection, {self._spec.name: self._spec}, chosen, applier_of=applier_of, at_once=due.at_once)

    def _expect(self, apply_s: float) -> None:
        """Let the next batches have as many records as the sink's transactions have time for."""
        if self._spec.target.records_max is not None:
            self._most = max(1, self._most // 2) if apply_s > APPLY_MAX_S else min(2 * self._most, self._records_max)
