"""Relay a backlog: rows that were written to the outbox while Connect was down, and nothing else runs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace

from confluent_kafka import Producer
from outbox.base.database import connect
from outbox.base.settings import Settings, SourceRole
from outbox.base.wait import wait_for
from outbox.kafka import topics
from outbox.kafka.clients import client_config
from outbox.relay import lifecycle
from outbox.relay.connectors import Connector
from outbox_lab.stack.connect import Connect
from outbox_lab.stack.process import Process
from outbox_lab.stack.stack import Stack

from bench.event import topic
from bench.meter import Drain, Meter, cpu_s, rarely

EVENTS_OF_A_TRANSACTION = 10
RELAY_TIMEOUT_S = 3600.0  # only a relay that hangs takes this long
POLL_S = 0.05
PUBLISH_TIMEOUT_S = 60.0
BATCH_ROWS = 1_000
TAKE = """
DELETE FROM outbox
 WHERE id IN (SELECT id FROM outbox ORDER BY id LIMIT %s FOR UPDATE SKIP LOCKED)
RETURNING id, aggregateid, type, schema_version, payload
"""
# What our connector's file sets for speed and for bounded memory; without it Debezium's defaults count.
TUNED = {
    "poll.interval.ms",
    "max.batch.size",
    "max.queue.size",
    "max.queue.size.in.bytes",
    "snapshot.fetch.size",
    "snapshot.select.statement.overrides",
}
KAFKA_BATCH_BYTES = 16_384  # a producer's default; the file of our worker sets more
# A million events of a thousand accounts, with amounts that add up from zero.
WRITE = """
DO $$
DECLARE accounts uuid[] := ARRAY(SELECT gen_random_uuid() FROM generate_series(1, 1000));
BEGIN
    FOR number IN 1..{transactions} LOOP
        INSERT INTO outbox (id, aggregatetype, aggregateid, type, payload)
        SELECT uuidv7(), 'balance', account, 'credited',
               jsonb_build_object('transfer_id', gen_random_uuid(), 'account_id', account, 'amount', 1,
                                  'currency', 'EUR', 'balance_after', version, 'version', version,
                                  'occurred_at', to_char(now() AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'))
          FROM (SELECT accounts[1 + (number * {size} + place) % 1000] AS account,
                       1 + (number * {size} + place) / 1000 AS version
                  FROM generate_series(1, {size}) AS place);
        COMMIT;
    END LOOP;
END $$
"""


def with_defaults(connector: Connector) -> Connector:
    """The connector with Debezium's defaults."""
    return replace(connector, config={name: value for name, value in connector.config.items() if name not in TUNED})


class DefaultWorker(Connect):
    """Our worker, but the producers of its tasks have Kafka's defaults."""

    def properties(self) -> Mapping[str, str]:
        return {**super().properties(), "producer.batch.size": str(KAFKA_BATCH_BYTES)}


def relay(
    settings: Settings,
    one: Connector,
    events: int,
    report: Callable[[str], None],
    worker_of: Callable[[Settings], Process] = Connect,
) -> Drain:
    """Stop Connect, write so many events, start a worker as the settings say, and measure until all are on the topic.

    ``one`` is the outbox's connector. Offsets of the topic are counted; up to one in a hundred of them is the marker of
    a transaction of Connect.
    """
    stack = Stack(settings)
    stack.up(["connect"], report=report)
    lifecycle.apply(settings, one)
    worker, broker, database = worker_of(settings), stack.part("kafka"), stack.part("postgres")
    _relay_some(settings, worker)
    worker.stop()
    _empty(settings)
    write(settings, events)
    before = offsets(settings)
    meter = Meter(events, database)
    meter.start(lambda: cpu_s([*worker.processes(), *broker.processes()]))
    worker.spawn()

    def relayed() -> bool:
        count = offsets(settings) - before
        meter.applied(count)
        return count >= events

    needs = rarely(worker.require_running)
    wait_for("the backlog to be relayed", relayed, timeout_s=RELAY_TIMEOUT_S, poll_s=POLL_S, needs=needs)
    return meter.result()


def poll(settings: Settings, events: int) -> Drain:
    """Relay the events by a polling publisher in place of Connect."""
    stack = Stack(settings)
    stack.part("connect").stop()
    _empty(settings)
    write(settings, events)
    broker = stack.part("kafka")
    meter = Meter(events, stack.part("postgres"))
    meter.start(lambda: time.process_time() + cpu_s(broker.processes()))
    for count in publish(settings):
        meter.applied(count)
    return meter.result()


def publish(settings: Settings) -> Iterator[int]:
    """Publish all rows without Debezium: read them by SQL, send them, and delete them once Kafka has them. Yields how
    many are published, after each batch.

    They are in the order of their ids, and so the events of a key in that of their commits only if their transactions
    were written one after the other.
    """
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


def _relay_some(settings: Settings, worker: Process) -> None:
    """Let the connector store an offset. Without one it would begin with a snapshot of the table."""
    before = offsets(settings)
    write(settings, EVENTS_OF_A_TRANSACTION)
    wait_for(
        "the first events",
        lambda: offsets(settings) > before,
        timeout_s=RELAY_TIMEOUT_S,
        poll_s=POLL_S,
        needs=worker.require_running,
    )


def _empty(settings: Settings) -> None:
    with closing(connect(settings, SourceRole.OWNER)) as connection, connection, connection.cursor() as cursor:
        cursor.execute("TRUNCATE outbox")


def write(settings: Settings, events: int) -> None:
    """Write so many events to the outbox."""
    transactions = events // EVENTS_OF_A_TRANSACTION
    with closing(connect(settings, SourceRole.APP)) as connection, connection.cursor() as cursor:
        connection.autocommit = True
        cursor.execute("SET synchronous_commit = off")
        cursor.execute(WRITE.format(transactions=transactions, size=EVENTS_OF_A_TRANSACTION))


def offsets(settings: Settings) -> int:
    """How many offsets of the topic can be read."""
    return sum(topics.last_stable_offsets(settings, topic(settings)).values())
