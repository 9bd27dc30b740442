"""`outbox check` beside a service, a relay and a sink of two topics that never rest: it finds nothing wrong."""

from __future__ import annotations

import json
import random
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass

from confluent_kafka import Message, Producer
from psycopg2 import extensions

from outbox.audit import check
from outbox.base.database import connect
from outbox.base.settings import Settings, SinkRole, SourceRole
from outbox.kafka.clients import client_config
from outbox_lab.testing.helpers import chosen_seed
from tests.support import kept_rows
from tests.support.topic_reader import topic_of

CHECKS = 12
SINK = "activity"
OCCURRED_AT = "2026-11-21T10:00:00.123456Z"
UPSERTS = {
    "item": "INSERT INTO items AS row (id, unit, stock, version) VALUES (%s, 'KGM', 1, 1)"
    " ON CONFLICT (id) DO UPDATE SET stock = row.stock + 1, version = row.version + 1 RETURNING version",
    "order": "INSERT INTO orders AS row (id, version) VALUES (%s, 1)"
    " ON CONFLICT (id) DO UPDATE SET version = row.version + 1 RETURNING version",
}
TYPES = {"item": ("received", 1), "order": ("placed", 2)}
WRITE = """
INSERT INTO outbox (aggregatetype, aggregateid, type, schema_version, payload) VALUES (%s, %s, %s, %s, %s) RETURNING id
"""
POSITION = """
INSERT INTO positions (sink, topic, partition, topic_id, next_offset) VALUES (%s, %s, %s, 'x', %s)
ON CONFLICT (sink, topic, partition) DO UPDATE SET next_offset = excluded.next_offset
"""
APPLY = """
INSERT INTO activity AS row (sink, aggregate, key, events, kinds) VALUES (%s, %s, %s, 1, '{}')
ON CONFLICT (sink, aggregate, key) DO UPDATE SET events = row.events + 1
"""


@dataclass
class Sent:
    """An event on its way."""

    aggregate: str
    key: str
    event_id: str
    payload: str
    partition: int
    offset: int = -1

    def arrive(self, _: object, message: Message) -> None:
        """Note where it is."""
        self.offset = message.offset() or 0


class Life:
    """Writes events, relays them and applies them, one step after the other and each as far as chance has it."""

    def __init__(self, settings: Settings, seed: int) -> None:
        self._settings = settings
        self._random = random.Random(seed)  # noqa: S311
        self._keys = [str(uuid.UUID(int=number)) for number in range(1, 9)]
        self._topics = {aggregate: topic_of(settings, aggregate) for aggregate in TYPES}
        self._written: list[Sent] = []
        self._relayed: list[Sent] = []

    def run(self, halt: threading.Event) -> None:
        """Live until ``halt``, and then until everything has arrived."""
        with (
            closing(connect(self._settings, SourceRole.OWNER)) as source,
            closing(connect(self._settings, SinkRole.OWNER)) as sink,
        ):
            producer = Producer({**client_config(self._settings), "transactional.id": f"life-{uuid.uuid4()}"})
            producer.init_transactions(30)
            kept_rows.start(self._settings, SINK)
            while not halt.is_set() or self._written or self._relayed:
                if not halt.is_set():
                    with source, source.cursor() as cursor:
                        self._written += [self._write(cursor) for _ in range(self._random.randint(1, 4))]
                self._relay(producer)
                with sink, sink.cursor() as cursor:
                    self._apply(cursor)

    def _write(self, cursor: extensions.cursor) -> Sent:
        aggregate = self._random.choice(list(TYPES))
        key = self._random.choice(self._keys)
        if aggregate == "order":
            key = key.replace("0000-0000", "1111-1111", 1)
        cursor.execute(UPSERTS[aggregate], [key])
        [(version,)] = cursor.fetchall()
        payload = {"item_id": key, "quantity": 1, "unit": "KGM", "version": version, "occurred_at": OCCURRED_AT}
        payload |= {"movement_id": key, "stock_after": version} if aggregate == "item" else {"order_id": key}
        text = json.dumps(payload)
        cursor.execute(WRITE, [aggregate, key, *TYPES[aggregate], text])
        [(event_id,)] = cursor.fetchall()
        return Sent(aggregate, key, event_id, text, partition=int(key[-1], 16) % 2)

    def _relay(self, producer: Producer) -> None:
        count = self._random.randint(0, len(self._written))
        if not count:
            return
        relayed, self._written = self._written[:count], self._written[count:]
        producer.begin_transaction()
        for sent in relayed:
            type_, version = TYPES[sent.aggregate]
            producer.produce(
                self._topics[sent.aggregate],
                sent.payload,
                sent.key,
                sent.partition,
                on_delivery=sent.arrive,
                headers={"id": sent.event_id, "eventType": type_, "schemaVersion": str(version)},
            )
        producer.commit_transaction(30)
        self._relayed += relayed

    def _apply(self, cursor: extensions.cursor) -> None:
        """Events of one topic, in their order in each partition."""
        aggregate = self._random.choice(list(TYPES))
        mine = [sent for sent in self._relayed if sent.aggregate == aggregate]
        mine = mine[: self._random.randint(0, len(mine))]
        for sent in mine:
            cursor.execute(APPLY, [SINK, aggregate, sent.key])
            cursor.execute(POSITION, [SINK, self._topics[aggregate], sent.partition, sent.offset + 1])
        self._relayed = [sent for sent in self._relayed if sent not in mine]


def test_a_check_beside_a_running_chain_finds_nothing_wrong(topic: Settings) -> None:
    in_flight, halt = 0, threading.Event()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(Life(topic, chosen_seed()).run, halt)
        try:
            for number in range(CHECKS):
                report = check.check(topic, incremental=bool(number % 2))
                assert (report.findings, running.done()) == ([], False)
                in_flight += not report.settled
        finally:
            halt.set()
            running.result(60)
    report = check.check(topic)
    assert (report.findings, report.settled) == ([], True)
    assert report.sink(SINK).comparison("events").totals
    assert all(one.records for one in report.topics)
    assert in_flight, "no check was beside an event under way"
