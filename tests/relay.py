"""What tests of the relay share: rows put into the outbox, and the topic read back."""

from __future__ import annotations

import json
import random
import threading
import uuid
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any, NamedTuple

import psycopg2
from confluent_kafka import Consumer, KafkaException, TopicPartition
from psycopg2.extras import execute_values

from outbox.base.database import connect
from outbox.base.errors import Failure
from outbox.base.settings import Settings, SourceRole
from outbox.base.wait import wait_for
from outbox.kafka import topics
from outbox.kafka.clients import client_config

INSERT = "INSERT INTO outbox (aggregatetype, aggregateid, type, payload, traceparent) VALUES %s"


class Row(NamedTuple):
    """A row for the outbox table; the database adds id, schema version and time."""

    aggregatetype: str
    aggregateid: str
    type: str
    payload: str
    traceparent: str | None = None


class Record(NamedTuple):
    """A record of the topic."""

    partition: int
    offset: int
    key: str
    value: str
    headers: dict[str, str | None]
    timestamp_ms: int

    @property
    def id(self) -> str:
        """The event's id."""
        return self.headers["id"] or ""


def row(account: str | None = None, version: int = 1, amount: int = 5, traceparent: str | None = None) -> Row:
    """A row as the service writes it."""
    account = account or str(uuid.uuid4())
    payload = {
        "transfer_id": str(uuid.uuid4()),
        "account_id": account,
        "amount": amount,
        "currency": "EUR",
        "balance_after": amount * version,
        "version": version,
        "occurred_at": "2026-11-21T10:00:00.123456Z",
    }
    kind = "transfer.credited" if amount > 0 else "transfer.debited"
    return Row("account", account, kind, json.dumps(payload), traceparent)


def insert(settings: Settings, *rows: Row) -> None:
    """Each row in a transaction of its own, as the service's role."""
    with closing(connect(settings, SourceRole.APP)) as connection:
        connection.autocommit = True
        with connection.cursor() as cursor:
            for each in rows:
                execute_values(cursor, INSERT, [each])


def ids(settings: Settings) -> list[str]:
    """The events in the outbox table, the oldest first."""
    with closing(connect(settings, SourceRole.CDC)) as connection, connection.cursor() as cursor:
        cursor.execute("SELECT id FROM outbox ORDER BY id")
        return [found for (found,) in cursor]


class Log:
    """The topic as a read_committed reader sees it, read on from where it was."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.records: list[Record] = []
        self._consumer = Consumer(
            {
                **client_config(settings),
                "group.id": f"test-{uuid.uuid4()}",
                "isolation.level": "read_committed",
                "enable.auto.commit": False,
                "fetch.wait.max.ms": 20,
                "log_level": 0,
            }
        )
        self._next = topics.first_offsets(settings, settings.topic)
        self._consumer.assign([TopicPartition(settings.topic, *place) for place in self._next.items()])

    def read(self) -> list[Record]:
        """Everything committed by now."""
        end = topics.last_stable_offsets(self._settings, self._settings.topic)
        while not self._has_reached(end):
            for message in self._consumer.consume(num_messages=5000, timeout=0.1):
                if message.error() is not None:
                    raise KafkaException(message.error())
                headers: list[tuple[str, Any]] = list(message.headers() or [])  # type: ignore[arg-type]  # never a dict here
                assert len(dict(headers)) == len(headers), headers
                self.records.append(
                    Record(
                        partition=message.partition() or 0,
                        offset=message.offset() or 0,
                        key=(message.key() or b"").decode(),
                        value=(message.value() or b"").decode(),
                        headers={name: None if value is None else value.decode() for name, value in headers},
                        timestamp_ms=message.timestamp()[1],
                    )
                )
        return self.records

    def wait_for(self, wanted: Collection[str], timeout_s: float = 60) -> list[Record]:
        """Read until all these events have come; what else has come by then is returned too."""

        def missing() -> set[str]:
            return set(wanted) - {record.id for record in self.read()}

        wait_for(f"{len(wanted)} events on the topic", lambda: not missing(), timeout_s=timeout_s, poll_s=0.02)
        return self.records

    def close(self) -> None:
        self._consumer.close()

    def _has_reached(self, end: dict[int, int]) -> bool:
        for place in self._consumer.position([TopicPartition(self._settings.topic, number) for number in self._next]):
            self._next[place.partition] = max(self._next[place.partition], place.offset)
        return all(self._next[partition] >= offset for partition, offset in end.items())


def read(settings: Settings) -> list[Record]:
    """Everything committed on the topic by now."""
    with closing(Log(settings)) as log:
        return log.read()


def relayed(settings: Settings, wanted: Collection[str] | None = None, timeout_s: float = 60) -> list[Record]:
    """Wait until these events, or else all that are in the outbox table now, are on the topic, and return all of it."""
    with closing(Log(settings)) as log:
        return log.wait_for(ids(settings) if wanted is None else wanted, timeout_s)


def duplicates(records: Sequence[Record]) -> int:
    """How many records carry an event that another one has brought already."""
    return len(records) - len({record.id for record in records})


def out_of_order(records: Sequence[Record]) -> list[str]:
    """Keys whose events came first in another order than that of their versions, or on more than one partition."""
    seen: dict[str, dict[str, int]] = defaultdict(dict)
    partitions: dict[str, set[int]] = defaultdict(set)
    for record in sorted(records, key=lambda record: (record.partition, record.offset)):
        seen[record.key].setdefault(record.id, json.loads(record.value)["version"])
        partitions[record.key].add(record.partition)
    return [
        key
        for key, versions in seen.items()
        if list(versions.values()) != sorted(versions.values()) or len(partitions[key]) > 1
    ]


PAUSE_S = 0.005  # between transactions: a load, not a flood that the relay could not keep up with


class Writer(threading.Thread):
    """Writes events all the time: small transactions of random size on random keys, as the service's role.

    A database that is away is waited for; whether the transaction under way then was committed is not known to it, so
    what counts is what the table holds.
    """

    def __init__(self, settings: Settings, seed: int, keys: int = 40) -> None:
        super().__init__(name="writer", daemon=True)
        self._settings = settings
        self._random = random.Random(seed)  # noqa: S311
        self._keys = [str(uuid.UUID(int=self._random.getrandbits(128))) for _ in range(keys)]
        self._versions: Counter[str] = Counter()
        self._halt = threading.Event()
        self.committed = 0
        self.interruptions = 0

    def run(self) -> None:
        while not self._halt.is_set():
            try:
                self._write()
            except (psycopg2.OperationalError, psycopg2.InterfaceError, Failure):
                self.interruptions += 1
                self._halt.wait(0.1)

    def halt(self) -> None:
        """End after the transaction under way."""
        self._halt.set()
        self.join(60)
        assert not self.is_alive()

    def _write(self) -> None:
        with closing(connect(self._settings, SourceRole.APP)) as connection, connection.cursor() as cursor:
            while not self._halt.is_set():
                rows = []
                for _ in range(self._random.randint(1, 20)):
                    key = self._random.choice(self._keys)
                    self._versions[key] += 1
                    rows.append(row(key, version=self._versions[key]))
                execute_values(cursor, INSERT, rows)
                connection.commit()
                self.committed += len(rows)
                self._halt.wait(PAUSE_S)


@contextmanager
def writing(settings: Settings, seed: int) -> Iterator[Writer]:
    """A writer at work, its seed printed."""
    print(f"seed of the writer: {seed}")  # noqa: T201
    writer = Writer(settings, seed)
    writer.start()
    try:
        yield writer
    finally:
        writer.halt()
