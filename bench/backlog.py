"""Drain a backlog: the Spark sink, a fast consumer written by hand, and COPY and SQL alone, in turns in one run."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path

import psutil
from confluent_kafka import Producer
from outbox.base.database import connect
from outbox.base.settings import Settings, SinkRole
from outbox.base.wait import wait_for
from outbox.kafka import topics
from outbox.kafka.clients import client_config
from outbox.relay import connectors
from outbox_lab.stack.process import Process

from bench.event import payload, topic, uuid7
from bench.meter import Drain, Meter, cpu_s

ACCOUNTS = 1_000
POLL_S = 0.1  # rarely, because each look costs the side that is measured
DRAIN_TIMEOUT_S = 3600.0  # only a sink that hangs takes this long
APPLIED = "SELECT coalesce(sum(next_offset), 0) FROM positions WHERE sink = %s AND topic = %s"


def produce(
    settings: Settings, events: int, report: Callable[[str], None], *, are_sampled: bool = False
) -> Mapping[str, int]:
    """Create the topics, and put events with an amount of 1 on one of them as fast as a client can; returns how many by
    account.

    ``are_sampled``: each is in a trace of its own, which its sender records.
    """
    topics.create(settings, connectors.topic_specs(settings))
    producer = Producer({**client_config(settings), "linger.ms": 50, "compression.type": "lz4"})
    accounts = [str(uuid.uuid4()) for _ in range(ACCOUNTS)]
    versions: dict[str, int] = defaultdict(int)
    for number in range(events):
        account = random.choice(accounts)
        versions[account] += 1
        headers: dict[str, str | bytes | None] = {
            "id": str(uuid7()),
            "eventType": "credited",
            "schemaVersion": "1",
        }
        if are_sampled:
            headers["traceparent"] = f"00-{random.getrandbits(128):032x}-{random.getrandbits(64):016x}-01"
        send(producer, topic(settings), payload(account, 1, versions[account]), account, headers)
        if number % 250_000 == 0:
            report(f"produced {number}")
    producer.flush()
    return versions


def send(producer: Producer, to: str, value: str | bytes, key: str, headers: dict[str, str | bytes | None]) -> None:
    """Put one record into the producer's queue, and wait while the queue is full."""
    while True:
        try:
            producer.produce(to, value, key, headers=headers)
            return
        except BufferError:
            producer.poll(0.1)


def drain_with(
    process: Process,
    count: AbstractContextManager[Callable[[], int]],
    meter: Meter,
    helpers: Sequence[Process] = (),
) -> Drain:
    """Drain with a process that is started for it; ``count`` says how many events it has applied."""
    meter.start(lambda: sum(cpu_s(one.processes()) for one in (process, *helpers)))
    process.spawn()
    try:
        with count as applied_now:

            def drained() -> bool:
                events = applied_now()
                meter.applied(events)
                return events >= meter.events

            needs = process.require_running
            wait_for("the backlog to drain", drained, timeout_s=DRAIN_TIMEOUT_S, poll_s=POLL_S, needs=needs)
        return meter.result()
    finally:
        process.stop()


def drain_on_one_core(process: Process, count: AbstractContextManager[Callable[[], int]], meter: Meter) -> Drain:
    """`drain_with`, with all threads of the process on one core of this machine."""
    ours = psutil.Process()
    cores = ours.cpu_affinity()
    ours.cpu_affinity(cores[:1])  # a process that is started inherits it
    try:
        return drain_with(process, count, meter)
    finally:
        ours.cpu_affinity(cores)


def applied(settings: Settings, name: str) -> AbstractContextManager[Callable[[], int]]:
    """A function that says how many events a sink has applied."""
    return counted(settings, APPLIED, name, topic(settings))


@contextmanager
def counted(settings: Settings, query: str, *parameters: str) -> Iterator[Callable[[], int]]:
    """A function that asks the sink database for a number."""
    with closing(connect(settings, SinkRole.OWNER)) as connection, connection.cursor() as cursor:
        connection.autocommit = True

        def count() -> int:
            cursor.execute(query, parameters)
            ((found,),) = cursor.fetchall()
            return int(found)

        yield count


def drain_here(meter: Meter, applied: Iterable[int]) -> Drain:
    """Drain with a loop in this process, which yields how many events it has applied."""
    meter.start(time.process_time)
    for count in applied:
        meter.applied(count)
    return meter.result()


@contextmanager
def busy(cores: int) -> Iterator[None]:
    """Keep so many cores busy with nothing."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(cores)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def empty(settings: Settings, table: str = "balances") -> None:
    """Let every drain begin with the same: no ids, no results, no positions, no checkpoint."""
    with closing(connect(settings, SinkRole.OWNER)) as connection, connection, connection.cursor() as cursor:
        cursor.execute(f"TRUNCATE processed_events, {table}, positions")
    shutil.rmtree(Path(settings.checkpoints.removeprefix("file://")), ignore_errors=True)
