"""A polling publisher: instead of Debezium it reads the outbox by SQL, sends the events, and deletes the rows.

It takes the rows in the order of their ids. So it sends the events of a key in the order of their commits only if their
transactions were written one after the other.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing

from confluent_kafka import Producer
from outbox.base.database import connect
from outbox.base.settings import Settings, SourceRole
from outbox.kafka.clients import client_config

from bench.event import topic

PUBLISH_TIMEOUT_S = 60.0
BATCH_ROWS = 1_000
TAKE = """
DELETE FROM outbox
 WHERE id IN (SELECT id FROM outbox ORDER BY id LIMIT %s FOR UPDATE SKIP LOCKED)
RETURNING id, aggregateid, type, schema_version, payload
"""


def relay(settings: Settings) -> Iterator[int]:
    """Publish all rows; yields how many are published, after each batch. They are deleted once Kafka has them."""
    published = 0
    producer = Producer({**client_config(settings), "enable.idempotence": True, "linger.ms": 5})
    with closing(connect(settings, SourceRole.OWNER)) as connection, connection.cursor() as cursor:
        while True:
            cursor.execute(TAKE, [BATCH_ROWS])
            rows = sorted(cursor.fetchall())
            for identity, key, kind, version, payload in rows:
                headers: dict[str, str | bytes | None] = {
                    "id": str(identity),
                    "eventType": kind,
                    "schemaVersion": str(version),
                }
                producer.produce(topic(settings), json.dumps(payload), key, headers=headers)
            if producer.flush(PUBLISH_TIMEOUT_S):
                raise TimeoutError("Kafka has not taken the events")
            connection.commit()
            if not rows:
                return
            published += len(rows)
            yield published
