"""Measure commit → topic and commit → balance, on a quiet stack: one event at a time, and at a steady rate."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field

from confluent_kafka import Consumer, TopicPartition
from outbox.base.database import connect
from outbox.base.settings import Settings, SourceRole
from outbox.base.wait import wait_for
from outbox.kafka import topics
from outbox.kafka.clients import client_config
from outbox_lab.stack.process import Process
from outbox_lab.stack.stack import Stack
from psycopg2.extensions import connection

from bench import peers
from bench.event import event_id, payload, topic, uuid7
from bench.meter import rarely

POLL_S = 0.005  # often enough for precision, and rarely enough to leave the processor to the chain
ARRIVAL_TIMEOUT_S = 300.0  # only a chain that hangs takes this long, even for its first event on a busy machine
PAUSE_S = 0.02  # between two events: the stack is quiet when an event is written


@dataclass
class Latencies:
    """Seconds from the commit until the event was seen, one value per event."""

    topic_s: list[float] = field(default_factory=list)
    balance_s: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Sink:
    """Whose result is looked at: a sink's process and name, and the table that says how many events it has applied."""

    process: Process
    name: str
    result: str = "balances"


def one_by_one(settings: Settings, sink: Sink, events: int) -> Latencies:
    """Write events one by one, each after the last has reached the balance, and measure their arrival."""
    with _account(settings, sink) as account:
        for _ in range(events):
            account.write()
            account.wait()
            time.sleep(PAUSE_S)
        return account.latencies()


def at_rate(settings: Settings, sink: Sink, per_s: float, duration_s: float) -> Latencies:
    """Write events at a steady rate, each in a transaction, and measure their arrival."""
    with _account(settings, sink) as account, ThreadPoolExecutor(1, "writer") as writer:
        began_s = time.monotonic()

        def write() -> None:
            for number in range(round(per_s * duration_s)):
                time.sleep(max(0.0, began_s + number / per_s - time.monotonic()))
                account.write()

        writing = writer.submit(write)
        while not writing.done():
            account.look()
            time.sleep(POLL_S)
        writing.result()
        account.wait()
        return account.latencies()


class Account:
    """An account whose events are written, and looked for in the result of a sink and on the topic."""

    def __init__(
        self,
        source: connection,
        applied: Callable[[], int],
        applied_before: int,
        arrived: Mapping[str, float],
        needs: Callable[[], None],
    ) -> None:
        """``applied`` says how many events the sink has applied, of any account, and there were so many before.

        ``needs`` raises if an event cannot arrive any more.
        """
        self._source, self._applied, self._applied_before, self._arrived = source, applied, applied_before, arrived
        self._needs = needs
        self._id = str(uuid.uuid4())
        self._events: list[str] = []
        self._committed_at: list[float] = []
        self._applied_at: list[float] = []

    def write(self) -> None:
        """Write an event and commit."""
        event = str(uuid7())
        with self._source.cursor() as cursor:
            cursor.execute(INSERT, [event, self._id, payload(self._id, 1, len(self._events) + 1)])
        self._source.commit()
        self._events.append(event)
        self._committed_at.append(time.monotonic())

    def look(self) -> bool:
        """Look at the result; whether all that was written is applied."""
        applied = self._applied() - self._applied_before
        self._applied_at += [time.monotonic()] * (applied - len(self._applied_at))
        return len(self._applied_at) >= len(self._events)

    def wait(self) -> None:
        """Wait until all that was written is applied, and was seen on the topic."""
        self._wait("the result", self.look)
        self._wait("the record", lambda: self._events[-1] in self._arrived)

    def _wait(self, what: str, condition: Callable[[], bool]) -> None:
        wait_for(what, condition, timeout_s=ARRIVAL_TIMEOUT_S, poll_s=POLL_S, needs=rarely(self._needs))

    def latencies(self) -> Latencies:
        """Of all events."""
        return Latencies(
            [self._arrived[event] - at for event, at in zip(self._events, self._committed_at, strict=True)],
            [seen - at for seen, at in zip(self._applied_at, self._committed_at, strict=True)],
        )


@contextmanager
def _account(settings: Settings, sink: Sink) -> Iterator[Account]:
    worker = Stack(settings).part("connect")

    def needs() -> None:
        worker.require_running()
        sink.process.require_running()

    with (
        _arrivals(settings) as arrived,
        closing(connect(settings, SourceRole.APP)) as source,
        peers.applied(settings, sink.name, sink.result) as applied,
    ):
        yield Account(source, applied, _written(settings), arrived, needs)


def _written(settings: Settings) -> int:
    with closing(connect(settings, SourceRole.OWNER)) as owner, owner.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM outbox")
        ((count,),) = cursor.fetchall()
        return int(count)


INSERT = """INSERT INTO outbox (id, aggregatetype, aggregateid, type, payload)
            VALUES (%s, 'balance', %s, 'credited', %s)"""


@contextmanager
def _arrivals(settings: Settings) -> Iterator[dict[str, float]]:
    """The time at which a reader of committed records saw each event id on the topic."""
    arrived: dict[str, float] = {}
    ends = topics.last_stable_offsets(settings, topic(settings))
    consumer = Consumer(
        {
            **client_config(settings),
            "group.id": f"bench-{uuid.uuid4()}",
            "isolation.level": "read_committed",
            "fetch.wait.max.ms": 5,
        }
    )
    consumer.assign([TopicPartition(topic(settings), partition, offset) for partition, offset in ends.items()])
    stopping = threading.Event()

    def read() -> None:
        while not stopping.is_set():
            message = consumer.poll(0.05)
            if message is not None and message.error() is None:
                arrived[event_id(message)] = time.monotonic()

    reader = threading.Thread(target=read, name="arrivals")
    reader.start()
    try:
        yield arrived
    finally:
        stopping.set()
        reader.join()
        consumer.close()
