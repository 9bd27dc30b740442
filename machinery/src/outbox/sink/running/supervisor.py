"""The sinks of one process, on one engine: they run side by side, and one that fails starts again by itself.

A sink that fails is reported at once. If its failure may pass (`PASSING`), it starts again after a
while, with everything new: connection, fence, writer, stream. Its neighbours run meanwhile, and the health of the
process names it. If that does not help, the process ends with the failure, and what runs the process starts that again.
After any other failure the sink stays down while its neighbours run, because another attempt would end likewise.

The fence lives in the database connection. A driver that has lost it starts again only if nobody else has the sink: it
does not fight for it.
"""

from __future__ import annotations

import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from types import MappingProxyType

import psycopg2
from psycopg2 import extensions

from outbox.base import log
from outbox.base.database import connect, hang_up
from outbox.base.errors import Failure
from outbox.base.settings import Settings, SinkRole
from outbox.base.wait import timeout_scale
from outbox.kafka import topics
from outbox.kafka.topics import TopicIds
from outbox.sink.decoding.records import fetcher
from outbox.sink.remembering import fence
from outbox.sink.remembering.positions import TopicOffsets
from outbox.sink.running.metrics import Metrics, State, served
from outbox.sink.running.stream import Attempt, Engine, Stream, code_of
from outbox.sink.running.watchdog import Watchdog
from outbox.sink.spec import SinkSpec
from outbox.sink.writer import SinkWriter

POLL_S = 0.2
START_TIMEOUT_S = 30.0  # of a stop, for a start that is under way
# The codes of failures that may pass. Any other failure needs a person, or another deployment: lost events, another
# driver, a statement that the database refuses.
PASSING = {
    "checkpoint-unavailable",  # its file system; what makes a checkpoint unusable does not pass
    "database-busy",  # a lock wait, a deadlock, no room
    "database-connection-lost",
    "database-silent",
    "database-unavailable",
    "fence-lingers",  # of our own last connection, which Postgres has not missed yet
    "kafka-unavailable",
    "producer-fenced",  # by a driver that has the fence; or a transaction took too long
    "sink-superseded",  # by a repair; the sink continues where that has set it
    "spark-failed",
    "table-failed",
    "table-locked",
    "token-server-unavailable",
    "topic-missing",  # also to a broker that has just started; one that was made again is another failure
    "topic-silent",
    "target-failed",  # what it writes to may be away
    "transform-failed",  # what it reads may be away
}
OF_PROCESS = {"event-loop-blocked"}  # what passes in another process alone
FIRST_DELAY_S = 1.0
MAX_DELAY_S = 60.0
FAILURES_MAX = 10
WITHIN_S = 30 * 60.0


def run(
    settings: Settings,
    specs: Sequence[SinkSpec],
    unusable: Mapping[str, Failure] = MappingProxyType({}),
    *,
    engine: Callable[[Settings, Sequence[SinkSpec]], AbstractContextManager[Engine]],
    until_caught_up: bool = False,
) -> None:
    """Run these sinks, on an engine that is started for them, until SIGTERM or SIGINT, or until all that their topics
    have committed at the start is applied.

    A batch that is being applied when the signal arrives is finished and committed. A sink that fails, or cannot start,
    does not stop the others. It starts again after a failure that may pass, unless ``until_caught_up``: then the caller
    decides. Once all have ended, or one has failed again and again, raises its failure, or that of the first of
    ``specs`` that failed.

    ``unusable``: by name, why other sinks of the process cannot run as they are declared. Its health names them, and
    the first of these failures is raised at the end if no other is.
    """
    with ExitStack() as resources:
        metrics, watchdog = Metrics(), resources.enter_context(Watchdog(settings))
        supervisors = [Supervisor(settings, spec, metrics, watchdog, restarts=not until_caught_up) for spec in specs]
        for name, failure in unusable.items():
            metrics.now(name, State.FAILED, failure.code)
        # The fences first: a second driver is refused before it touches anything, Spark included.
        for supervisor in supervisors:
            resources.callback(supervisor.disconnect)
            supervisor.connect()
        resources.enter_context(served(settings, metrics))
        names = {topic for spec in specs for topic in spec.topics}
        ids = {name: topics.describe(settings, name).id for name in names}
        targets = {name: topics.last_stable_offsets(settings, name) for name in names}
        started = resources.enter_context(engine(settings, specs))
        wake = resources.enter_context(_signals())  # after Spark's start, which installs a handler of its own
        try:
            for supervisor in supervisors:
                supervisor.start(started, ids, until_caught_up=until_caught_up)
            _watch(supervisors, TopicIds(settings, names), wake)
        finally:
            for supervisor in supervisors:
                supervisor.begin_nothing()  # while others are stopped
            for supervisor in supervisors:
                supervisor.stop()
        for supervisor in sorted(supervisors, key=lambda one: not one.is_exhausted):
            supervisor.raise_failure()
        for failure in unusable.values():
            raise failure
        if until_caught_up:
            for supervisor in supervisors:
                supervisor.require(targets)


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


def _watch(supervisors: Sequence[Supervisor], topic_ids: TopicIds, wake: queue.SimpleQueue[None]) -> None:
    """Return when asked to stop, when all sinks have ended, or when one has failed again and again."""
    while True:
        try:
            wake.get(timeout=POLL_S)
        except queue.Empty:
            ids = topic_ids.look()
            for supervisor in supervisors:
                supervisor.look(ids)
            if all(one.has_ended() for one in supervisors) or any(one.is_exhausted for one in supervisors):
                return
        else:
            return


class Retries:
    """The failures of one sink since it last applied a batch. Not for several threads at once."""

    def __init__(self) -> None:
        self._failed_at: deque[float] = deque()
        self.are_exhausted = False
        """Whether the sink has failed `FAILURES_MAX` times within `WITHIN_S`, each time in a way that may pass; or once
        in a way that passes in another process alone.
        """

    @property
    def count(self) -> int:
        """The number of failures."""
        return len(self._failed_at)

    def succeeded(self) -> None:
        """Forget the failures: the sink has applied a batch."""
        self._failed_at.clear()

    def delay_s(self, code: str, now_s: float) -> float | None:
        """Seconds until the next attempt after a failure, doubled each time; None if there is to be none.

        ``now_s`` is of the monotonic clock.
        """
        if code in OF_PROCESS:
            self.are_exhausted = True
        if code not in PASSING:
            return None
        while self._failed_at and now_s - self._failed_at[0] > WITHIN_S:
            self._failed_at.popleft()
        self._failed_at.append(now_s)
        self.are_exhausted = self.count >= FAILURES_MAX
        return None if self.are_exhausted else min(FIRST_DELAY_S * 2 ** (self.count - 1), MAX_DELAY_S)


class Supervisor:
    """Runs one sink by one attempt after the other. One thread may call its methods."""

    _writer: SinkWriter  # of the present attempt
    _engine: Engine

    def __init__(
        self, settings: Settings, spec: SinkSpec, metrics: Metrics, watchdog: Watchdog, *, restarts: bool
    ) -> None:
        self._settings = settings
        self._spec = spec
        self._metrics = metrics
        self._guard = watchdog.guard(spec.name)
        self._restarts = restarts
        self._log = log.get(__name__).bind(sink=spec.name)
        self._retries = Retries()
        self._connection: extensions.connection | None = None  # of the present attempt, as the next one
        self._connections: Sequence[extensions.connection] = ()  # this one, and what its writer has besides
        self._stream: Stream | None = None
        self._is_active = False
        self._stopping = threading.Event()
        self._restart: threading.Thread | None = None  # while it waits for the next attempt, and begins it
        self._failure: BaseException | None = None  # of the last attempt
        self._is_over = False  # whether there is no other attempt
        metrics.now(spec.name, State.STARTING)

    @property
    def is_exhausted(self) -> bool:
        """Whether the sink has started again in vain so often that the process is to end."""
        return self._retries.are_exhausted

    def connect(self) -> None:
        """Become the sink's driver. Raises Failure if that is another one, or the database is unavailable."""
        self._connection = connect(self._settings, SinkRole.WRITER)
        self._connections = [self._connection]
        with self._guard.working(self._connections):
            self._writer = self._spec.target.writer(
                self._settings, self._connection, self._spec, fetcher(self._settings)
            )
        self._connections = self._writer.connections

    def disconnect(self) -> None:
        """End the connection if there is one, so that another driver may take the sink over."""
        for connection in self._connections:
            connection.close()

    def start(self, engine: Engine, topic_ids: Mapping[str, str], *, until_caught_up: bool = False) -> None:
        """Start the stream of a driver that has connected. A failure is kept, and looked at later."""
        assert self._connection is not None, "connected"  # noqa: S101
        self._engine = engine
        ids = {topic: topic_ids[topic] for topic in self._spec.topics}
        attempt = Attempt(self._settings, self._spec, ids, self._connection, self._writer, self._metrics, self._guard)
        self._stream = engine(attempt)
        self._stream.start(until_caught_up)
        self.look()

    def has_ended(self) -> bool:
        """Whether the sink does not run, and will not start again."""
        return self._restart is None and (self._is_over or not (self._is_active or self._failure))

    def look(self, topic_ids: Mapping[str, str] = MappingProxyType({})) -> None:
        """Look after the sink: if it has failed in a way that may pass, let it start again after a while.

        ``topic_ids`` are what topics have now, as far as that is known.
        """
        if self._restart is not None:
            if self._restart.is_alive():
                return
            self._restart = None
        if self._stream is None:
            return
        # In this order: a stream that ends in between is seen active, and looked at again.
        self._is_active = self._stream.is_active()
        self._stream.require_topics(topic_ids)
        if self._is_active:
            self._stream.require_connection()
        if self._failure is None and self._stream.has_failed():
            self._failure = self._stream.failure
        if self._failure is None:
            if self._stream.has_applied():
                self._retries.succeeded()
            if self._is_active and not self._stream.must_repeat():
                self._metrics.now(self._spec.name, State.RUNNING)
        elif not self._is_over:
            self._decide(self._failure)

    def begin_nothing(self) -> None:
        """Let no other batch be applied, and no other attempt begin. A batch that is being applied goes on."""
        self._stopping.set()
        if self._stream is not None:
            self._stream.begin_no_batch()

    def stop(self) -> None:
        """Stop between two batches, as `Stream.stop`. An attempt that is about to begin does not."""
        self.begin_nothing()
        if self._restart is not None:
            self._restart.join(START_TIMEOUT_S * timeout_scale())
            if self._restart.is_alive() and self._connection is not None:
                hang_up(self._connection)
        if self._stream is not None:
            self._stream.stop()
            self._failure = self._failure or self._stream.failure

    def raise_failure(self) -> None:
        """Raise what ended the last attempt, if that was an error."""
        if self._failure is not None:
            raise self._failure

    def require(self, targets: TopicOffsets) -> None:
        """Raises Failure if the sink has not applied everything on its topics below these offsets."""
        if self._stream is not None:
            self._stream.require(targets)

    def _decide(self, failure: BaseException) -> None:
        code = code_of(failure)
        delay_s = self._retries.delay_s(code, time.monotonic()) if self._restarts else None
        if delay_s is None:
            self._is_over = True
            self._metrics.now(self._spec.name, State.FAILED, code)
            if self.is_exhausted:
                self._log.error("the sink does not recover: the process ends", failures=self._retries.count)
        else:
            self._metrics.now(self._spec.name, State.FAILING, code)
            self._log.warning("the sink starts again", in_s=delay_s, failures=self._retries.count)
        self._restart = threading.Thread(
            target=self._start_again, args=[delay_s], name=f"restart {self._spec.name}", daemon=True
        )
        self._restart.start()

    def _start_again(self, delay_s: float | None) -> None:
        """End what is left of the failed attempt, and begin another one after the delay, unless there is to be none.

        In a thread of its own, so that neither neighbours nor a stop wait for it.
        """
        if self._stream is not None:
            self._stream.stop()
        if delay_s is None or self._stopping.wait(delay_s):
            return
        lost = self._writer.fence_holder
        try:
            self.connect()
            ids = {topic: topics.describe(self._settings, topic).id for topic in self._spec.topics}
        except Exception as error:
            self._failure = self._explained(error, lost)
            self._log.error("sink failed", error=str(self._failure), code=code_of(self._failure))
            self.disconnect()
            return
        if not self._stopping.is_set():
            self._failure = None
            self.start(self._engine, ids)

    def _explained(self, error: Exception, lost: fence.Holder | None) -> Exception:
        """The failure of a start. If the driver that has the sink is the connection that we have lost, that passes."""
        if code_of(error) != "sink-has-driver" or self._connection is None:
            return error
        with suppress(psycopg2.Error), self._connection, self._connection.cursor() as cursor:
            if fence.driver(cursor, self._spec.name) in (lost, None):
                return Failure(
                    f"sink {self._spec.name}: Postgres still has the connection that was lost",
                    f"it notices within {fence.DEAD_HOST_S} s",
                    code="fence-lingers",
                )
        return error
