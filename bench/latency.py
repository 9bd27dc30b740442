"""Commit → topic and commit → balance, on a quiet stack with one event at a time."""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime

from confluent_kafka import Consumer, TopicPartition

from outbox import topics
from outbox.database import connect
from outbox.settings import BalancesRole, LedgerRole, Settings
from outbox.wait import wait_for

PAUSE_S = 0.02  # between the arrival of an event and the next: a quiet stack, and no rhythm to fall in with


@dataclass
class Latencies:
    """Seconds from the commit until the event was seen, one an event."""

    topic_s: list[float] = field(default_factory=list)
    balance_s: list[float] = field(default_factory=list)


def measure(settings: Settings, sink: str, events: int) -> Latencies:
    """Write events one by one, each once the last has reached the balance, and time their arrival."""
    account = str(uuid.uuid4())
    found = Latencies()
    ledger, balances = connect(settings, LedgerRole.APP), connect(settings, BalancesRole.SINK)
    balances.autocommit = True
    try:
        with _arrivals(settings) as arrived, ledger.cursor() as writer, balances.cursor() as reader:
            for version in range(1, events + 1):
                event_id = str(uuid.UUID(bytes=_uuid7()))
                writer.execute(INSERT, [event_id, account, json.dumps(_event(account, version))])
                ledger.commit()
                committed_at = time.monotonic()

                def applied(version: int = version) -> bool:
                    reader.execute(APPLIED, [sink, account])
                    row = reader.fetchone()
                    return row is not None and row[0] >= version

                wait_for("the balance", applied, timeout_s=30, poll_s=0.001)
                found.balance_s.append(time.monotonic() - committed_at)
                wait_for("the record", lambda: event_id in arrived, timeout_s=30, poll_s=0.001)
                found.topic_s.append(arrived[event_id] - committed_at)
                time.sleep(PAUSE_S)
    finally:
        ledger.close()
        balances.close()
    return found


INSERT = """INSERT INTO outbox (id, aggregatetype, aggregateid, type, payload)
            VALUES (%s, 'account', %s, 'transfer.credited', %s)"""
APPLIED = "SELECT version FROM balances WHERE sink = %s AND account_id = %s"


def _event(account: str, version: int) -> dict[str, object]:
    return {
        "transfer_id": str(uuid.uuid4()),
        "account_id": account,
        "amount": 1,
        "currency": "EUR",
        "balance_after": version,
        "version": version,
        "occurred_at": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
    }


def _uuid7() -> bytes:
    """A UUIDv7 (RFC 9562, 5.7): 48 bits of milliseconds, version, variant, random."""
    random = uuid.uuid4().bytes
    return time.time_ns().__floordiv__(1_000_000).to_bytes(6) + bytes([0x70 | random[6] & 0x0F]) + random[7:]


@contextmanager
def _arrivals(settings: Settings) -> Iterator[dict[str, float]]:
    """The moment at which each event id was seen on the topic by a reader of committed records."""
    arrived: dict[str, float] = {}
    ends = topics.last_stable_offsets(settings, settings.topic)
    consumer = Consumer(
        {
            **topics.client_config(settings),
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
                headers = dict(message.headers() or [])
                arrived[bytes(headers["id"]).decode()] = time.monotonic()

    reader = threading.Thread(target=read, name="arrivals")
    reader.start()
    try:
        yield arrived
    finally:
        stopping.set()
        reader.join()
        consumer.close()
