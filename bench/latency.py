"""Measure commit → topic and commit → balance, on a quiet stack with one event at a time."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from confluent_kafka import Consumer, TopicPartition

from bench.event import event_id, payload, uuid7
from outbox.base.database import connect
from outbox.base.settings import Settings, SinkRole, SourceRole
from outbox.base.wait import wait_for
from outbox.kafka import topics
from outbox.kafka.clients import client_config

POLL_S = 0.005  # often enough for precision, and rarely enough to leave the processor to the chain
ARRIVAL_TIMEOUT_S = 300.0  # only a chain that hangs takes this long, even for its first event on a busy machine
PAUSE_S = 0.02  # between two events: the stack is quiet when an event is written


@dataclass
class Latencies:
    """Seconds from the commit until the event was seen, one value per event."""

    topic_s: list[float] = field(default_factory=list)
    balance_s: list[float] = field(default_factory=list)


def measure(settings: Settings, sink: str, events: int) -> Latencies:
    """Write events one by one, each after the last has reached the balance, and measure their arrival."""
    account = str(uuid.uuid4())
    found = Latencies()
    source, balances = connect(settings, SourceRole.APP), connect(settings, SinkRole.WRITER)
    balances.autocommit = True
    try:
        with _arrivals(settings) as arrived, source.cursor() as writer, balances.cursor() as reader:
            for version in range(1, events + 1):
                identity = str(uuid7())
                writer.execute(INSERT, [identity, account, payload(account, 1, version)])
                source.commit()
                committed_at = time.monotonic()

                def applied(version: int = version) -> bool:
                    reader.execute(APPLIED, [sink, account])
                    row = reader.fetchone()
                    return row is not None and row[0] >= version

                wait_for("the balance", applied, timeout_s=ARRIVAL_TIMEOUT_S, poll_s=POLL_S)
                found.balance_s.append(time.monotonic() - committed_at)
                seen_at = wait_for(
                    "the record", partial(arrived.get, identity), timeout_s=ARRIVAL_TIMEOUT_S, poll_s=POLL_S
                )
                found.topic_s.append(seen_at - committed_at)
                time.sleep(PAUSE_S)
    finally:
        source.close()
        balances.close()
    return found


INSERT = """INSERT INTO outbox (id, aggregatetype, aggregateid, type, payload)
            VALUES (%s, 'account', %s, 'transfer.credited', %s)"""
APPLIED = "SELECT version FROM balances WHERE sink = %s AND account_id = %s"


@contextmanager
def _arrivals(settings: Settings) -> Iterator[dict[str, float]]:
    """The time at which a reader of committed records saw each event id on the topic."""
    arrived: dict[str, float] = {}
    ends = topics.last_stable_offsets(settings, settings.topic)
    consumer = Consumer(
        {
            **client_config(settings),
            "group.id": f"bench-{uuid.uuid4()}",
            "isolation.level": "read_committed",
            "fetch.wait.max.ms": 5,
        }
    )
    consumer.assign([TopicPartition(settings.topic, partition, offset) for partition, offset in ends.items()])
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
