"""An outbox row as a record of the topic: the contract of the events, at its writing end."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager

import psycopg2.extensions
from confluent_kafka import Producer

from outbox.base.database import connect
from outbox.base.settings import Settings, SourceRole
from outbox.events import catalog
from outbox.kafka import topics
from outbox.kafka.clients import client_config
from outbox.relay import lifecycle
from outbox_lab.stack.postgres import Postgres
from tests import items
from tests.support.outbox_rows import Row, ids, insert, row
from tests.support.topic_reader import Record, out_of_order, read, relayed, topic_of

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
LONG_AGO_MS = 1_000_000_000_000  # in 2001
CLOCK_MARGIN_MS = 60_000
COLUMNS = "INSERT INTO outbox (aggregatetype, aggregateid, type, payload"


@contextmanager
def transaction(settings: Settings, role: SourceRole = SourceRole.APP) -> Iterator[psycopg2.extensions.cursor]:
    """A transaction, committed at the end unless it was ended before."""
    with closing(connect(settings, role)) as connection, connection.cursor() as cursor:
        yield cursor
        connection.commit()


def arrivals(settings: Settings, before: list[str]) -> list[Record]:
    """The records of the rows that were written since, and whatever has come besides, in the order of the topic."""
    return [record for record in relayed(settings) if record.id not in before]


def send(settings: Settings, *rows: Row) -> list[Record]:
    """The records of these rows."""
    before = [record.id for record in read(settings)]
    insert(settings, *rows)
    return arrivals(settings, before)


def test_a_row_becomes_a_record_that_keeps_the_contract(shared_chain: Settings) -> None:
    written = row(quantity=-5, traceparent=TRACEPARENT)
    [record] = send(shared_chain, written)
    assert record.key == written.aggregateid
    assert json.loads(record.value) == json.loads(written.payload)
    assert record.headers == {
        "id": ids(shared_chain)[-1],
        "eventType": written.type,
        "schemaVersion": "1",
        "traceparent": TRACEPARENT,
    }
    assert uuid.UUID(record.id).version == 7
    schema = catalog.of_project(shared_chain).schema(items.AGGREGATE, written.type, 1)
    assert schema.violation(json.loads(record.value)) is None
    assert schema.violation({**json.loads(record.value), "quantity": 0}) is not None


def test_a_record_of_the_snapshot_is_like_one_of_the_stream(topic: Settings) -> None:
    item = str(uuid.uuid4())
    insert(topic, row(item))
    lifecycle.apply(topic)
    try:
        insert(topic, row(item))
        first, second = relayed(topic)
    finally:
        lifecycle.remove(topic, drop_slot=True)
    assert set(first.headers) == set(second.headers)
    assert {**json.loads(first.value), "movement_id": ""} == {**json.loads(second.value), "movement_id": ""}


def test_text_and_numbers_arrive_as_they_were_written(shared_chain: Settings) -> None:
    odd = {"text": 'Zoë "quoted" \\ 日本 🙂 \u0001', "big": 9223372036854775807, "small": -9223372036854775808}
    payload = {**odd, "nothing": None, "nested": {"list": [1, {"deep": True}]}, "precise": 0.1, "large": "x" * 900_000}
    written = row()._replace(payload=json.dumps(payload, ensure_ascii=False), aggregateid="a key / with ümlauts")
    [record] = send(shared_chain, written)
    assert json.loads(record.value) == payload
    assert record.key == "a key / with ümlauts"


def test_another_schema_version_is_told_in_the_header(shared_chain: Settings) -> None:
    before = ids(shared_chain)
    with transaction(shared_chain) as cursor:
        cursor.execute(f"{COLUMNS}, schema_version) VALUES ('order', 'a', 'placed', '{{}}', 2)")
    [record] = arrivals(shared_chain, before)
    assert record.headers["schemaVersion"] == "2"


def test_rows_that_are_deleted_changed_or_rolled_back_are_no_events(shared_chain: Settings, postgres: Postgres) -> None:
    written = send(shared_chain, row(), row())
    assert written[0].headers.get("traceparent") is None
    with transaction(shared_chain, SourceRole.PRUNER) as cursor:
        cursor.execute("DELETE FROM outbox WHERE id = %s", [written[0].id])
    change = f"UPDATE outbox SET traceparent = 'changed' WHERE id = '{written[1].id}'"
    postgres.psql(change, shared_chain.source_db_url.name)
    with transaction(shared_chain) as cursor:
        cursor.execute(f"{COLUMNS}) VALUES ('item', 'a', 'received', '{{}}')")
        cursor.connection.rollback()
    known = len(read(shared_chain))
    send(shared_chain, row())  # comes behind whatever the others would have become
    assert len(read(shared_chain)) == known + 1


def test_the_events_of_a_key_keep_their_order_on_one_partition(shared_chain: Settings) -> None:
    keys = [str(uuid.uuid4()) for _ in range(20)]
    records = send(shared_chain, *(row(key, version) for version in range(1, 26) for key in keys))
    assert len(records) == 500
    assert {record.key for record in records} == {*keys}
    assert out_of_order(records) == []
    partitions = topics.describe(shared_chain, topic_of(shared_chain)).partitions
    assert {record.partition for record in records} == set(range(partitions))


def test_a_record_has_the_time_of_its_arrival(topic: Settings) -> None:
    """Retention counts from there. By a producer's time, an old event could be deleted before a sink has read it."""
    began_ms = time.time() * 1000
    producer = Producer(client_config(topic))
    producer.produce(topic_of(topic), "late", partition=0, headers={"id": "1"}, timestamp=LONG_AGO_MS)
    producer.flush(30)
    [record] = read(topic)
    assert record.timestamp_ms > began_ms - CLOCK_MARGIN_MS


def test_the_last_stable_offset_stops_before_an_open_transaction(topic: Settings) -> None:
    def end() -> int:
        return topics.last_stable_offsets(topic, name)[0]

    name, config = topic_of(topic), client_config(topic)
    plain, transactional = Producer(config), Producer({**config, "transactional.id": f"test-{uuid.uuid4()}"})
    transactional.init_transactions(30)
    plain.produce(name, "first", partition=0, headers={"id": "1"})
    plain.flush(30)
    assert end() == 1
    transactional.begin_transaction()
    for _ in range(3):
        transactional.produce(name, "never", partition=0, headers={"id": "2"})
    transactional.flush(30)
    plain.produce(name, "behind", partition=0, headers={"id": "3"})
    plain.flush(30)
    assert end() == 1  # what comes behind an open transaction waits for it
    transactional.abort_transaction(30)
    assert end() == 1 + 3 + 1 + 1  # the marker takes an offset too
    assert [record.value for record in read(topic)] == ["first", "behind"]
