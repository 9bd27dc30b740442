"""A consumer as tutorials show it: one transaction for each record, and then its offset."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import closing

import msgspec
from confluent_kafka import Consumer, TopicPartition
from outbox.base.database import connect
from outbox.base.settings import Settings, SinkRole
from outbox.kafka import topics
from outbox.kafka.clients import client_config

from bench.by_hand import RecordValue
from bench.event import event_id, topic

NAME = "row-by-row"
TABLE = "CREATE TABLE IF NOT EXISTS row_events (event_id uuid PRIMARY KEY)"
REMEMBER = "INSERT INTO row_events VALUES (%s) ON CONFLICT DO NOTHING"
ADD = """
INSERT INTO balances AS known (sink, account_id, currency, balance_minor, version, events)
VALUES (%s, %s, %s, %s, %s, 1)
    ON CONFLICT (sink, account_id) DO UPDATE
   SET balance_minor = known.balance_minor + excluded.balance_minor, version = excluded.version,
       events = known.events + 1, updated_at = now()
"""


def drain(settings: Settings, events: int, *, is_trivial: bool = False) -> Iterator[int]:
    """Drain so many events of the topic; yields how many are applied, after each. A trivial consumer only remembers
    them.
    """
    decode = msgspec.json.Decoder(RecordValue).decode
    config = {
        **client_config(settings),
        "group.id": f"bench-{uuid.uuid4()}",
        "isolation.level": "read_committed",
        "enable.auto.commit": False,
    }
    with closing(connect(settings, SinkRole.OWNER)) as connection, closing(Consumer(config)) as consumer:
        with connection, connection.cursor() as cursor:
            cursor.execute(TABLE)
        ends = topics.last_stable_offsets(settings, topic(settings))
        consumer.assign([TopicPartition(topic(settings), partition, 0) for partition in ends])
        applied = 0
        while applied < events:
            message = consumer.poll(1)
            if message is None:
                continue
            event = decode(message.value() or b"")
            with connection, connection.cursor() as cursor:
                cursor.execute(REMEMBER, [event_id(message)])
                if cursor.rowcount and not is_trivial:
                    cursor.execute(ADD, [NAME, str(event.account_id), event.currency, event.amount, event.version])
            consumer.commit(message=message, asynchronous=True)
            applied += 1
            yield applied
