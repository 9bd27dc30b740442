"""A consumer written by hand, as fast as we can write one: batches of librdkafka, msgspec, binary COPY, the same SQL.

It has no schema, no dead letters, no fence and no positions: it shows what a simple loop can reach.
"""

from __future__ import annotations

import io
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgspec
import numpy as np
from confluent_kafka import Consumer, Message, TopicPartition
from outbox.base.database import connect
from outbox.base.settings import Settings, SinkRole
from outbox.kafka import topics
from outbox.kafka.clients import client_config
from outbox.sink.applying.postgres.applier import PostgresApplier
from outbox.sink.applying.projection import load
from outbox.sink.discovery import resolve, sinks
from outbox.sink.remembering import strategy

from bench.event import event_id, topic

FETCH_MESSAGES = 10_000  # the maximum that librdkafka returns in one call
FROM_2000 = datetime(2000, 1, 1, tzinfo=UTC)
BUFFER_BYTES = 1 << 20
EVENT = "balance.credited"
COPY = """
COPY outbox_batch (event_id, partition, "offset", transfer_id, account_id, amount, currency, balance_after, version,
            occurred_at)
FROM STDIN WITH (FORMAT binary)
"""
# https://www.postgresql.org/docs/18/sql-copy.html, "Binary Format"
HEADER, TRAILER = b"PGCOPY\n\xff\r\n\0" + bytes(8), b"\xff\xff"
FIELDS = {
    "event_id": "V16",
    "partition": ">i4",
    "offset": ">i8",
    "transfer_id": "V16",
    "account_id": "V16",
    "amount": ">i8",
    "currency": "V3",
    "balance_after": ">i8",
    "version": ">i8",
    "occurred_at": ">i8",
}
ROW = np.dtype(
    [("fields", ">i2"), *(one for name, form in FIELDS.items() for one in ((f"{name}_bytes", ">i4"), (name, form)))]
)


class RecordValue(msgspec.Struct):
    """The value of a record."""

    transfer_id: uuid.UUID
    account_id: uuid.UUID
    amount: int
    currency: str
    balance_after: int
    version: int
    occurred_at: datetime


class File(NamedTuple):
    """A batch as a file for COPY."""

    path: Path
    events: int


def binary(messages: Sequence[Message]) -> bytes:
    """Records as the input of a binary COPY."""
    decode = msgspec.json.Decoder(RecordValue).decode
    events = [decode(message.value() or b"") for message in messages]
    rows = np.zeros(len(messages), ROW)
    rows["fields"] = len(FIELDS)
    for name, form in FIELDS.items():
        rows[f"{name}_bytes"] = np.dtype(form).itemsize
    rows["event_id"] = _fixed((bytes.fromhex(event_id(message).replace("-", "")) for message in messages), "V16")
    rows["partition"] = [message.partition() for message in messages]
    rows["offset"] = [message.offset() for message in messages]
    for name in ("transfer_id", "account_id"):
        rows[name] = _fixed((getattr(event, name).bytes for event in events), "V16")
    rows["currency"] = _fixed((event.currency.encode() for event in events), "V3")
    for name in ("amount", "balance_after", "version"):
        rows[name] = [getattr(event, name) for event in events]
    rows["occurred_at"] = [_microseconds(event.occurred_at) for event in events]
    return HEADER + rows.tobytes() + TRAILER


def _fixed(values: Iterable[bytes], form: str) -> np.ndarray[Any, Any]:
    return np.frombuffer(b"".join(values), form)


def _microseconds(moment: datetime) -> int:
    since = moment - FROM_2000
    return (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds


def drain(settings: Settings, name: str, batch_events: int) -> Iterator[int]:
    """Drain the topic; yields how many events are applied, after each batch."""
    applied = 0
    with _applying(settings, name) as apply:
        for messages in read(settings, batch_events):
            apply(io.BytesIO(binary(messages)))
            applied += len(messages)
            yield applied


def drain_files(settings: Settings, name: str, files: Iterable[File]) -> Iterator[int]:
    """The limit: the same COPY and SQL, and nothing else; yields how many events are applied, after each file."""
    applied = 0
    with _applying(settings, name) as apply:
        for one in files:
            with one.path.open("rb") as rows:
                apply(rows)
            applied += one.events
            yield applied


def write_files(settings: Settings, folder: Path, batch_events: int) -> Iterator[File]:
    """Write the batches of the topic into files for COPY."""
    for number, messages in enumerate(read(settings, batch_events)):
        path = folder / f"batch-{number:04}"
        path.write_bytes(binary(messages))
        yield File(path, len(messages))


def read(settings: Settings, batch_events: int) -> Iterator[Sequence[Message]]:
    """The records of the topic in batches. The offsets of a batch are committed when the next one is asked for."""
    end = topics.last_stable_offsets(settings, topic(settings))
    config = {
        **client_config(settings),
        "group.id": f"bench-{uuid.uuid4()}",
        "isolation.level": "read_committed",
        "enable.auto.commit": False,
        "fetch.wait.max.ms": 5,
        "queued.min.messages": 200_000,
    }
    with closing(Consumer(config)) as consumer:
        consumer.assign([TopicPartition(topic(settings), partition, 0) for partition in end])
        left = sum(end.values())
        while left:
            messages: list[Message] = []
            while len(messages) < min(batch_events, left):
                messages += consumer.consume(FETCH_MESSAGES, timeout=1)
            left -= len(messages)
            yield messages
            consumer.commit(asynchronous=False)


@contextmanager
def _applying(settings: Settings, name: str) -> Iterator[Callable[[IO[bytes]], None]]:
    """A function that applies a batch in a transaction, by the SQL of a sink. It knows one event."""
    spec = resolve(settings, replace(sinks(settings)[name].job, name="by-hand", events=[EVENT]))
    projections = load(spec.job.projections, spec.strategy.takes)
    parts = [spec.strategy.select, *(part for one in projections for part in (one.refuse, one.apply))]
    script = [part for part in (*parts, spec.strategy.remember) if part]
    with closing(connect(settings, SinkRole.WRITER)) as connection:
        with connection, connection.cursor() as cursor:
            PostgresApplier(spec).prepare(cursor)
        strategy.ensure_partitions(connection, {datetime.now(UTC).date()})

        def apply(rows: IO[bytes]) -> None:
            with connection, connection.cursor() as cursor:
                cursor.copy_expert(COPY, rows, BUFFER_BYTES)
                for statement in script:
                    cursor.execute(statement, {"sink": "by-hand", "topic": topic(settings)})

        yield apply
