"""Drain a backlog: the Spark sink compared with a fast hand-written consumer that runs the same SQL, in one run."""

from __future__ import annotations

import io
import json
import random
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from confluent_kafka import Consumer, Message, Producer, TopicPartition

from bench.event import event_id, payload, uuid7
from outbox.base.database import connect
from outbox.base.settings import Settings, SinkRole
from outbox.base.wait import wait_for
from outbox.kafka import topics
from outbox.kafka.clients import client_config
from outbox.sink import partitions
from outbox.sink.postgres.applier import PostgresApplier
from outbox.sink.projection import load
from outbox.sink.spec import sinks
from outbox.stack.command import sink

ACCOUNTS = 1_000
DRAIN_TIMEOUT_S = 3600.0  # only a sink that hangs takes this long
FETCH_MESSAGES = 10_000  # the maximum that librdkafka returns in one call

COPY = """
COPY batch (event_id, partition, "offset", transfer_id, account_id, amount, currency, balance_after, version,
            occurred_at)
FROM STDIN WITH (FORMAT csv)
"""


def produce(settings: Settings, events: int, report: Callable[[str], None]) -> None:
    """Put events on the topic as fast as a client can."""
    producer = Producer({**client_config(settings), "linger.ms": 50, "compression.type": "lz4"})
    accounts = [str(uuid.uuid4()) for _ in range(ACCOUNTS)]
    versions: dict[str, int] = defaultdict(int)
    for number in range(events):
        account = random.choice(accounts)
        versions[account] += 1
        headers: dict[str, str | bytes | None] = {
            "id": str(uuid7()),
            "eventType": "transfer.credited",
            "schemaVersion": "1",
        }
        while True:
            try:
                producer.produce(settings.topic, payload(account, 1, versions[account]), account, headers=headers)
                break
            except BufferError:
                producer.poll(0.1)
        if number % 250_000 == 0:
            report(f"produced {number}")
    producer.flush()


class Rates(NamedTuple):
    """Events per second over the two halves of a backlog.

    The first half begins at the first committed batch, so the start of the process does not count.
    """

    first_half: float
    second_half: float

    @classmethod
    def of(cls, seen: Sequence[tuple[float, int]], events: int) -> Rates:
        """The rates of a drain, observed as pairs of a time in seconds and the events applied by then."""
        middle = next(number for number, (_, applied) in enumerate(seen) if applied >= events // 2)
        return cls(_slope(seen[0], seen[middle]), _slope(seen[middle], seen[-1]))


def _slope(start: tuple[float, int], end: tuple[float, int]) -> float:
    return (end[1] - start[1]) / (end[0] - start[0])


def drain_with_spark(settings: Settings, name: str, events: int) -> Rates:
    """The rates of the Spark sink."""
    process = sink(settings, name)
    process.spawn()
    try:
        return _watch(settings, name, events)
    finally:
        process.stop()


def drain_by_hand(settings: Settings, strategy: str, batch_events: int) -> Rates:
    """The rates of a hand-written consumer: batches from librdkafka, json, COPY, the same SQL, then its offsets.

    It has no schema, dead letters, fence or positions: it shows what a simple loop can reach.
    """
    end = topics.last_stable_offsets(settings, settings.topic)
    consumer = Consumer(
        {
            **client_config(settings),
            "group.id": f"bench-{uuid.uuid4()}",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "fetch.wait.max.ms": 5,
            "queued.min.messages": 200_000,
        }
    )
    consumer.assign([TopicPartition(settings.topic, partition, 0) for partition in end])
    connection = connect(settings, SinkRole.WRITER)
    spec = sinks(settings)[strategy]
    projections = load(spec.job.projections, spec.strategy.takes)
    statements = [spec.strategy.select, *(part for one in projections for part in (one.refuse, one.apply) if part)]
    applied, seen = 0, []
    try:
        with connection, connection.cursor() as cursor:
            PostgresApplier(spec).prepare(cursor)
        partitions.ensure(connection, {datetime.now(UTC).date()})
        while applied < sum(end.values()):
            messages: list[Message] = []
            while len(messages) < batch_events and applied + len(messages) < sum(end.values()):
                messages += consumer.consume(FETCH_MESSAGES, timeout=1)
            with connection, connection.cursor() as cursor:
                cursor.copy_expert(COPY, _csv(messages), 1 << 20)
                for statement in statements:
                    cursor.execute(statement, {"sink": "by-hand", "topic": settings.topic})
            consumer.commit(asynchronous=False)
            applied += len(messages)
            seen.append((time.monotonic(), applied))
        return Rates.of(seen, applied)
    finally:
        connection.close()
        consumer.close()


def _csv(messages: list[Message]) -> io.StringIO:
    out = io.StringIO()
    for message in messages:
        event = json.loads(message.value() or b"")
        out.write(
            f"{event_id(message)},{message.partition()},{message.offset()},{event['transfer_id']},{event['account_id']},"
            f"{event['amount']},{event['currency']},{event['balance_after']},{event['version']},{event['occurred_at']}\n"
        )
    out.seek(0)
    return out


def _watch(settings: Settings, name: str, events: int) -> Rates:
    seen: list[tuple[float, int]] = []
    connection = connect(settings, SinkRole.WRITER)
    connection.autocommit = True
    try:
        with connection.cursor() as cursor:

            def drained() -> bool:
                cursor.execute(
                    "SELECT coalesce(sum(next_offset), 0) FROM positions WHERE sink = %s AND topic = %s",
                    [name, settings.topic],
                )
                row = cursor.fetchone()
                applied = int(row[0]) if row else 0
                if applied > (seen[-1][1] if seen else 0):
                    seen.append((time.monotonic(), applied))
                return applied >= events

            wait_for("the backlog to drain", drained, timeout_s=DRAIN_TIMEOUT_S, poll_s=0.01)
        return Rates.of(seen, events)
    finally:
        connection.close()
