"""The faults that make duplicates. Each proves that it fired; `outbox` is otherwise left as it was found.

A re-send puts an event on the topic again. A re-read delivers the same record to a sink again.
"""

from __future__ import annotations

import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import psycopg2
from confluent_kafka import Producer
from outbox.base.wait import wait_for
from outbox.kafka import topics
from outbox.kafka.clients import client_config
from outbox.relay import lifecycle, slot
from outbox.relay.rest import Rest
from outbox.sink import discovery
from outbox.sink.repair import rewind
from outbox.sink.repair.rewind import TopicPartition
from outbox_lab.stack import internals, ports
from outbox_lab.walkthrough.faults import Crash

from proof.matrix import sink_log, topic_log
from proof.matrix.chain import SETTLE_TIMEOUT_S, Chain
from proof.matrix.topic_log import Offsets

TERMINATE = "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE active_pid = %s"


class NotFired(Exception):
    """A fault has not happened. The message says why."""


class Fault(ABC):
    """One way to repeat events."""

    name: str
    title: str
    """The fault's name in the document."""
    is_of_relay: bool = False
    """Whether Connect's exactly-once keeps it from repeating anything."""
    repeats_history: bool = False
    """Whether it repeats everything so far, and not its own burst alone."""

    @abstractmethod
    def fire(self, chain: Chain, burst: Callable[[], None]) -> str:
        """Write the burst, break the chain, and let it work again. Returns the evidence, or raises NotFired."""


class CheckpointDeleted(Fault):
    """A sink without checkpoint begins at its positions. A plain consumer, like `naive`, begins at the beginning."""

    name = "checkpoint-deleted"
    title = "checkpoint deleted"
    repeats_history = True

    def fire(self, chain: Chain, burst: Callable[[], None]) -> str:
        burst()
        chain.wait_relayed()
        chain.wait_applied()
        chain.process.stop()
        for sink in chain.sinks:
            folder = chain.checkpoint(sink)
            if not any((folder / "commits").iterdir()):
                raise NotFired(f"sink {sink} has committed nothing to its checkpoint")
            shutil.rmtree(folder)
        chain.start_sinks()
        return f"{len(chain.sinks)} checkpoints were deleted"


class OffsetsReset(Fault):
    """The connectors forget where they were, so that they begin with a snapshot of their tables."""

    name = "offsets-reset"
    title = "connector's offsets reset: a new snapshot"
    repeats_history = True

    def fire(self, chain: Chain, burst: Callable[[], None]) -> str:
        burst()
        chain.wait_relayed()
        for connector in chain.connectors:
            lifecycle.remove(chain.settings, connector, drop_slot=True)
        for connector in chain.connectors:
            if lifecycle.apply(chain.settings, connector) != "created":
                raise NotFired(f"connector {connector.name} was there")
        return "both connectors were created again, without offset or slot"


class _Window(Fault):
    """A fault between the arrival of events on their topic and the next time that Connect stores offsets.

    Without exactly-once that is once a minute. The connectors are stopped before, which stores their offsets, so
    exactly the events of the burst are relayed and not noted.
    """

    is_of_relay = True

    def fire(self, chain: Chain, burst: Callable[[], None]) -> str:
        workers = [Rest(chain.settings, connector) for connector in chain.connectors]
        for worker in workers:
            worker.stop()
        for worker in workers:
            worker.resume()
        wait_for("the tasks to run", lambda: len(_readers(chain)) == len(workers), timeout_s=SETTLE_TIMEOUT_S)
        before = _confirmed(chain)
        burst()
        chain.wait_relayed()
        evidence = self.interrupt(chain)
        if not chain.exactly_once and _confirmed(chain) != before:
            raise NotFired("Connect has stored the offsets of the burst already")
        self.repair(chain)
        return evidence

    @abstractmethod
    def interrupt(self, chain: Chain) -> str:
        """Break the relay. Returns the evidence."""

    def repair(self, chain: Chain) -> None:
        """Return once the relay works again."""


class ConnectionTerminated(_Window):
    """Postgres ends the replication connections, as in a failover or a broken network."""

    name = "connection-terminated"
    title = "replication connection terminated"

    def __init__(self) -> None:
        self._readers: Mapping[str, int] = {}

    def interrupt(self, chain: Chain) -> str:
        self._readers = _readers(chain)
        settings = chain.settings
        with closing(
            psycopg2.connect(
                host=ports.LOOPBACK,
                port=settings.source_db_url.port,
                user="postgres",
                password=internals.read(settings.home).postgres_password.get_secret_value(),
                dbname=settings.source_db_url.name,
            )
        ) as connection:
            connection.autocommit = True
            with connection.cursor() as cursor:
                for pid in self._readers.values():
                    cursor.execute(TERMINATE, [pid])
                    if cursor.fetchall() != [(True,)]:
                        raise NotFired(f"backend {pid} had ended")
        return f"backends {', '.join(map(str, self._readers.values()))} were terminated"

    def repair(self, chain: Chain) -> None:
        def others() -> bool:
            now = _readers(chain)
            return all(now.get(name) not in (None, pid) for name, pid in self._readers.items())

        wait_for("other replication connections", others, timeout_s=SETTLE_TIMEOUT_S)


class WorkerKilled(_Window):
    """SIGKILL for the Connect worker when Kafka has the events and Connect has not stored that it sent them."""

    name = "worker-killed"
    title = "Connect worker killed between send and offset commit"

    def interrupt(self, chain: Chain) -> str:
        pid = chain.worker.pid()
        chain.worker.kill()
        if pid is None:
            raise NotFired("the worker did not run")
        return f"worker {pid} was killed"

    def repair(self, chain: Chain) -> None:
        chain.start_worker()


class SentAgain(Fault):
    """A producer sends each record of the burst a second time, by hand."""

    name = "sent-again"
    title = "each event sent again by a producer"
    shift = 0

    def fire(self, chain: Chain, burst: Callable[[], None]) -> str:
        names = {*chain.topics.values()}
        before = {topic: topics.last_stable_offsets(chain.settings, topic) for topic in names}
        burst()
        chain.wait_relayed()
        chain.wait_applied()
        return ", ".join(f"{self._send(chain, topic, before[topic])} records of {topic}" for topic in sorted(names))

    def _send(self, chain: Chain, topic: str, since: Offsets) -> int:
        producer = Producer({**client_config(chain.settings), "acks": "all"})
        found = [
            message
            for message in topic_log.messages(chain.settings, topic)
            if (message.offset() or 0) >= since[message.partition() or 0]
        ]
        for message in found:
            producer.produce(
                topic,
                key=message.key(),
                value=message.value(),
                headers=message.headers(),
                partition=((message.partition() or 0) + self.shift) % len(since),
            )
        if producer.flush(60):
            raise NotFired(f"Kafka did not take the records of {topic}")
        return len(found)


class SentToAnotherPartition(SentAgain):
    """Each event is sent again, to the partition after that of the original."""

    name = "sent-to-another-partition"
    title = "each event sent again, to another partition"
    shift = 1


class SinkKilled(Fault):
    """SIGKILL for the sinks when their database has committed a batch and Spark has not.

    The burst arrives while Spark is frozen, so each sink gets it as one batch.
    """

    name = "sink-killed"
    title = "sink killed between its database commit and Spark's"

    def fire(self, chain: Chain, burst: Callable[[], None]) -> str:
        chain.wait_applied()
        chain.process.pause_children()
        burst()
        chain.wait_relayed()
        log, since_bytes = chain.process.log_file, sink_log.size_bytes(chain.process.log_file)
        with chain.holding_positions():
            chain.process.pause_children()
        chain.wait_applied()
        wait_for("each sink to log its batch", lambda: _applied(log, since_bytes) == {*chain.sinks}, timeout_s=60)
        chain.process.kill()
        crashes = {sink: _crash(chain, sink) for sink in chain.sinks}
        missed = [sink for sink, crash in crashes.items() if not crash.fired]
        if missed:
            raise NotFired(f"not between the commits of {', '.join(missed)}")
        chain.start_sinks()
        return ", ".join(f"batch {crash.planned_batch} of {sink}" for sink, crash in crashes.items())


class SinkRewound(Fault):
    """`outbox rewind` to where the burst begins."""

    name = "sink-rewound"
    title = "sink rewound"

    def fire(self, chain: Chain, burst: Callable[[], None]) -> str:
        chain.wait_applied()
        before = chain.positions()
        burst()
        chain.wait_relayed()
        chain.wait_applied()
        chain.process.stop()
        for sink in chain.sinks:
            [topic] = discovery.chosen(chain.settings, sink).topics
            wanted = {TopicPartition(topic, partition): offset for partition, offset in before[sink].items()}
            rewind.rewind(chain.settings, sink, rewind.to_offsets(chain.settings, sink, wanted))
        chain.start_sinks()
        return f"{len(chain.sinks)} sinks were rewound"


FAULTS: Sequence[Fault] = (
    WorkerKilled(),
    ConnectionTerminated(),
    OffsetsReset(),
    SentAgain(),
    SentToAnotherPartition(),
    SinkKilled(),
    SinkRewound(),
    CheckpointDeleted(),
)


def _confirmed(chain: Chain) -> list[int]:
    """The position that each connector has confirmed to its slot."""
    found = [slot.read(chain.settings, connector) for connector in chain.connectors]
    return [0 if one is None else one.confirmed_lsn for one in found]


def _readers(chain: Chain) -> dict[str, int]:
    """By slot, the server process that reads it."""
    found = {connector.name: slot.read(chain.settings, connector) for connector in chain.connectors}
    return {name: one.active_pid for name, one in found.items() if one is not None and one.active_pid is not None}


def _applied(log: Path, since_bytes: int) -> set[str]:
    """The sinks that have logged a batch since then."""
    return {sink for sink, work in sink_log.read(log, since_bytes).items() if work.rows}


def _crash(chain: Chain, sink: str) -> Crash:
    folder = chain.checkpoint(sink)
    planned = _last(folder / "offsets")
    (end,) = json.loads((folder / "offsets" / str(planned)).read_text().splitlines()[-1]).values()
    return Crash(
        planned_batch=planned,
        committed_batch=_last(folder / "commits"),
        planned_end=sum(end.values()),
        position=sum(chain.positions()[sink].values()),
    )


def _last(log: Path) -> int:
    """The last batch in a log of a checkpoint; -1 before the first."""
    return max((int(entry.name) for entry in log.glob("[0-9]*")), default=-1)
