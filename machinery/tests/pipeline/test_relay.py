"""From the outbox table to the topics: nothing is lost at first start, the connector is applied idempotently, and what
Debezium would not notice is refused. Each event is on its topic, in order per key; a topic may be missing, and an
aggregate may move.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import closing, suppress
from datetime import UTC
from pathlib import Path

import pytest
import requests
from cloudevents.core.bindings.kafka import KafkaMessage, from_binary
from cloudevents.core.formats.json import JSONFormat
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from psycopg2.extras import execute_values

from outbox.base.database import connect
from outbox.base.project import load
from outbox.base.settings import Settings, SourceRole
from outbox.base.wait import wait_for
from outbox.events import catalog
from outbox.kafka import topics
from outbox.kafka.clients import client_config
from outbox.kafka.spec import TopicSpec
from outbox.maintenance import prune
from outbox.maintenance.prune import PruneResult
from outbox.migrations.migrate import migrate
from outbox.relay import connectors, lifecycle, offsets
from outbox.relay.rest import Rest
from outbox_lab.stack import config
from outbox_lab.stack.postgres import Postgres
from outbox_lab.stack.stack import Stack
from outbox_lab.testing.command import outbox
from outbox_lab.testing.failures import raises
from outbox_lab.testing.fixtures.stack import topic_of as topics_of
from outbox_lab.testing.helpers import query
from tests import items
from tests.support import kept_rows, slots, suite
from tests.support.declared import declare, work_for
from tests.support.outbox_rows import INSERT, Row, ids, insert, remove_guard, row, writing
from tests.support.topic_reader import (
    Log,
    Record,
    configure,
    delete_topics,
    duplicates,
    out_of_order,
    read,
    relayed,
    topic_of,
)

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def unapplied(topic: Settings) -> Iterator[Settings]:
    """Settings whose connector a test makes itself; it is removed in the end, whatever state it is in."""
    yield topic
    lifecycle.remove(topic, drop_slot=True)


def edited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **changes: str) -> None:
    """Change the connector's file; dots are written as two underscores."""
    config = json.loads((suite.DOMAIN / "connect" / "outbox.json").read_text())
    file = tmp_path / "outbox.json"
    file.write_text(json.dumps({**config, **{name.replace("__", "."): value for name, value in changes.items()}}))
    monkeypatch.setattr(connectors, "folder", lambda: tmp_path)


def assert_relays(settings: Settings) -> None:
    """A new event comes, and each event has come once."""
    insert(settings, row())
    assert sorted(record.id for record in relayed(settings)) == ids(settings)


def send(settings: Settings, *rows: Row) -> list[Record]:
    """The records of these rows."""
    before = ids(settings)
    insert(settings, *rows)
    return [record for record in relayed(settings) if record.id not in before]


# First start ------------------------------------------------------------------------------------------------------


def test_rows_written_while_the_connector_starts_arrive_once_each(unapplied: Settings) -> None:
    with writing(unapplied, seed=uuid.uuid4().int % 10**6) as writer:
        wait_for("rows before the connector", lambda: writer.committed > 500, timeout_s=30)
        before = writer.committed
        lifecycle.apply(unapplied)
        wait_for("rows after it", lambda: writer.committed > before + 500, timeout_s=30)
    records = relayed(unapplied)
    assert sorted(record.id for record in records) == ids(unapplied)
    assert out_of_order(records) == []


def test_a_snapshot_sends_the_events_of_a_key_in_order(unapplied: Settings) -> None:
    # A vacuum after a prune leaves room in front of the events that are not relayed yet, and later ones fill it.
    insert(unapplied, *(row() for _ in range(50)))
    key, pruned = str(uuid.uuid4()), ids(unapplied)
    insert(unapplied, row(key, 1), row(key, 2))
    with closing(connect(unapplied, SourceRole.OWNER)) as owner, owner.cursor() as cursor:
        owner.autocommit = True
        cursor.execute("DELETE FROM outbox WHERE id = ANY(%s::uuid[])", [pruned])
        cursor.execute("VACUUM outbox")
        insert(unapplied, row(key, 3), row(key, 4))
        cursor.execute("SELECT (payload ->> 'version')::int FROM outbox ORDER BY ctid")
        stored = [version for (version,) in cursor]
    assert stored != [1, 2, 3, 4], "they are stored in another order"
    lifecycle.apply(unapplied)
    first, *_ = of_snapshot = relayed(unapplied)
    assert [json.loads(record.value)["version"] for record in of_snapshot] == [1, 2, 3, 4]
    [of_stream] = send(unapplied, row(key, 5))
    assert of_stream.headers.keys() == first.headers.keys()
    assert json.loads(of_stream.value).keys() == json.loads(first.value).keys()


def test_registering_before_migrating_is_refused_and_loses_nothing(unapplied: Settings, postgres: Postgres) -> None:
    url = unapplied.source_db_url
    empty = unapplied.replace(source_db_url=url.replace(name=f"{url.name}_empty"))
    postgres.psql(f"CREATE DATABASE {empty.source_db_url.name} OWNER stock_source_owner")
    try:
        with raises("publication-wrong", "outbox migrate"):
            lifecycle.apply(empty)
        assert lifecycle.status(empty).connector == "MISSING"
        migrate(empty)
        insert(empty, row())
        lifecycle.apply(empty)
        assert [record.id for record in relayed(empty)] == ids(empty) != []
    finally:
        lifecycle.remove(empty, drop_slot=True)
        postgres.psql(f"DROP DATABASE {empty.source_db_url.name} WITH (FORCE)")


# Applying ---------------------------------------------------------------------------------------------------------


def test_a_connector_has_what_is_rendered_whatever_is_applied(
    chain: Settings, postgres: Postgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendered = connectors.load(chain).config
    assert {**rendered, "name": chain.connector} == Rest(chain).config()
    assert "database.password" not in rendered, "Debezium's driver finds it"
    url = f"{chain.connect_url}/connectors?expand=info&expand=status"
    answers = requests.get(url, auth=chain.connect_login, timeout=10).text
    assert chain.connector in answers
    assert chain.source_db_cdc_password.get_secret_value() not in answers + json.dumps(rendered)
    assert not [value for value in rendered.values() if "${settings:" in value]

    reader = wait_for("Debezium to read the slot", lambda: slots.reader(chain), timeout_s=30)
    assert lifecycle.apply(chain) == "unchanged"
    assert slots.reader(chain) == reader
    insert(chain, row())
    relayed(chain)

    current = Rest(chain).config()
    created = Rest(chain).create_stopped({**rendered, "poll.interval.ms": "11"})
    assert created == current, "another client has created it meanwhile"
    with monkeypatch.context() as patch:
        edited(tmp_path, patch, transaction__boundary="connector")
        with raises("connect-refused", "does not support connector-defined transaction boundaries"):
            lifecycle.apply(chain)
    assert Rest(chain).config() == current

    edited(tmp_path, monkeypatch, poll__interval__ms="11")
    assert lifecycle.apply(chain) == "updated"
    assert (Rest(chain).config() or {})["poll.interval.ms"] == "11"
    assert lifecycle.apply(chain) == "unchanged"
    assert (lifecycle.remove(chain), lifecycle.remove(chain)) == (True, False)
    insert(chain, row())
    lifecycle.apply(chain)  # it goes on where it was
    assert_relays(chain)


# What Debezium would not notice -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "code"), [("made again", "slot-ahead"), ("read by another", "slot-ahead"), ("released", "slot-released")]
)
def test_a_slot_that_has_lost_events_is_refused(chain: Settings, postgres: Postgres, how: str, code: str) -> None:
    insert(chain, row())
    relayed(chain)
    lifecycle.remove(chain)
    slots.wait_released(chain)
    before = slots.existing(chain)
    if how == "made again":
        slots.drop(chain)
    if how != "released":
        insert(chain, row())  # in no slot, or in the slot until it moves on

    def moved_on() -> bool:
        postgres.psql("CHECKPOINT")  # logs the running transactions, on every version
        slots.advance(chain)
        return slots.existing(chain).restart_lsn > before.confirmed_lsn

    if how == "made again":
        create = f"SELECT pg_create_logical_replication_slot('{chain.connector}', 'pgoutput')"
        postgres.psql(create, chain.source_db_url.name)
    elif how == "read by another":
        slots.advance(chain)
    else:
        wait_for("the log to be released", moved_on, timeout_s=30)
    with raises(code, "outbox connect remove --drop-slot"):
        lifecycle.apply(chain)
    lifecycle.remove(chain, drop_slot=True)
    lifecycle.apply(chain)
    assert {record.id for record in relayed(chain)} == set(ids(chain))


def test_a_slot_stays_until_the_stored_offsets_can_be_deleted(unapplied: Settings) -> None:
    lifecycle.apply(unapplied)
    with raises("offsets-kept", "OUTBOX_CONNECT_OFFSETS_TOPIC"):
        lifecycle.remove(unapplied.replace(connect_offsets_topic="of.another.worker"), drop_slot=True)
    assert Rest(unapplied).state().is_running
    insert(unapplied, row())
    relayed(unapplied)
    offsets_topic = connectors.load(unapplied).offsets_topic
    configure(unapplied, offsets_topic, "max.message.bytes", "50")
    with raises("offsets-kept", offsets_topic, "Broker: Message size too large"):
        lifecycle.remove(unapplied, drop_slot=True)
    configure(unapplied, offsets_topic, "max.message.bytes", "1048576")
    lifecycle.remove(unapplied, drop_slot=True)
    assert lifecycle.apply(unapplied) == "created"


def test_what_hangs_on_any_partition_of_the_offsets_is_ended(topic: Settings) -> None:
    """Connect makes the topic with 25 partitions if nobody has made it before."""
    connector = connectors.load(topic)
    delete_topics(topic, connector.offsets_topic)
    topics.create(topic, [TopicSpec(connector.offsets_topic, 3, {})])
    assert offsets.open_since(topic, connector) is None
    transactional_id = f"{topic.connect_group_id}-{connector.name}-0"
    producer = Producer({**client_config(topic), "transactional.id": transactional_id})
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce(connector.offsets_topic, b"{}", partition=2)
    producer.flush(30)
    assert offsets.open_since(topic, connector) is not None
    offsets.end_left_open(topic, connector)
    assert offsets.open_since(topic, connector) is None
    delete_topics(topic, connector.offsets_topic)
    topics.create(topic, connectors.topic_specs(topic))


def test_overlapping_transactions_are_no_recreated_slot(chain: Settings, postgres: Postgres) -> None:
    # The later event stands earlier in the log: the offset stored with it is below the commit that the slot has.
    with closing(connect(chain, SourceRole.APP)) as connection, connection.cursor() as cursor:
        execute_values(cursor, INSERT, [row()])
        insert(chain, row())
        relayed(chain, ids(chain))
        connection.commit()
    relayed(chain)
    rest = Rest(chain)
    rest.stop()  # by which it stores and confirms where it is
    url = f"{chain.connect_url}/connectors/{chain.connector}/offsets"
    answer = requests.get(url, auth=chain.connect_login, timeout=30).json()
    (stored,) = [entry["offset"] for entry in answer["offsets"]]
    assert stored["lsn"] < stored["lsn_commit"]
    lifecycle.apply(chain)
    assert_relays(chain)


def test_a_failed_task_is_reported_and_restarted_by_apply(chain: Settings) -> None:
    # Somebody else takes the task's transactional id, as a second Connect cluster of the same group would.
    group = re.findall(r"^group.id=(.*)$", config.file(config.WORKER).read_text(), re.MULTILINE)[0]
    rival = Producer({**client_config(chain), "transactional.id": f"{group}-{chain.connector}-0"})
    insert(chain, row())
    relayed(chain)  # else Connect has no offset yet, and the task begins with a snapshot
    rival.init_transactions(30)
    insert(chain, row())
    error = wait_for("the task to fail", lambda: lifecycle.status(chain).error, timeout_s=30)
    assert "\n" not in error
    assert "ProducerFencedException" in error or "InvalidProducerEpochException" in error
    status = outbox("connect", "status", home=chain.home, OUTBOX_CONNECTOR=chain.connector)
    assert status.returncode == 1
    assert status.stderr.startswith(f"outbox: connector {chain.connector} failed: {error} — ")
    assert "`outbox connect apply`" in status.stderr
    assert lifecycle.apply(chain) == "restarted"
    assert_relays(chain)


def test_a_connector_that_no_worker_runs_is_restarted_by_apply(chain: Settings) -> None:
    insert(chain, row())
    relayed(chain)
    # As a worker writes it that leaves; the one that stays does not notice (Kafka 4.3.1).
    topic = re.findall(r"^status.storage.topic=(.*)$", config.file(config.WORKER).read_text(), re.MULTILINE)[0]
    gone = {"state": "UNASSIGNED", "trace": None, "worker_id": "127.0.0.1:1", "generation": 1}
    producer = Producer(client_config(chain))
    producer.produce(topic, json.dumps(gone).encode(), key=f"status-connector-{chain.connector}".encode())
    assert producer.flush(30) == 0
    wait_for("the connector to be unassigned", lambda: Rest(chain).state().is_unassigned, timeout_s=30)
    assert lifecycle.apply(chain) == "restarted"
    assert lifecycle.status(chain).is_running
    assert_relays(chain)


# A row and its record ---------------------------------------------------------------------------------------------


def test_a_row_becomes_a_record_that_keeps_the_contract(chain: Settings) -> None:
    written = row(quantity=-5, traceparent=TRACEPARENT)
    payload = {"text": 'Zoë "quoted" \\ 日本 🙂 \u0001', "big": 2**63 - 1, "nothing": None, "large": "x" * 900_000}
    payload["nested"] = {"list": [1, {"deep": True}], "precise": 0.1}
    odd = row("a key / with ümlauts")._replace(payload=json.dumps(payload, ensure_ascii=False))
    newer = Row("order", "a", "placed", "{}", schema_version=2)
    found = {record.key: record for record in send(chain, written, odd, newer)}
    record = found[written.aggregateid]
    assert json.loads(record.value) == json.loads(written.payload)
    expected = {"id": ids(chain)[0], "eventType": written.type, "schemaVersion": "1", "traceparent": TRACEPARENT}
    assert record.headers == expected
    assert uuid.UUID(record.id).version == 7
    schema = catalog.of_project(chain).schema(items.AGGREGATE, written.type, 1)
    assert schema.violation(json.loads(record.value)) is None
    assert json.loads(found[odd.aggregateid].value) == payload
    assert found[odd.aggregateid].headers.get("traceparent") is None
    assert found["a"].headers["schemaVersion"] == "2"


def test_a_record_has_the_time_of_its_arrival(topic: Settings) -> None:
    """Retention counts from there. By a producer's time, an old event could be deleted before a sink has read it."""
    began_ms = time.time() * 1000
    producer = Producer(client_config(topic))
    producer.produce(topic_of(topic), "late", headers={"id": "1"}, timestamp=1_000_000_000_000)  # in 2001
    producer.flush(30)
    [record] = read(topic)
    assert record.timestamp_ms > began_ms - 60_000


# The log ----------------------------------------------------------------------------------------------------------


def test_an_idle_connector_and_health_checks_log_next_to_nothing(chain: Settings, stack: Stack) -> None:
    rest, log = Rest(chain), stack.part("connect").log_file

    def is_polling() -> bool:
        return "Processing messages" in log.read_text().rpartition(f"slot.name = {chain.connector}")[2]

    wait_for("the task to poll", is_polling, timeout_s=60)
    assert rest.offset() is None, "no event is relayed yet"
    before = len(log.read_text())
    end = time.monotonic() + 4
    while time.monotonic() < end:
        assert stack.part("connect").is_ready()
        assert rest.state().is_running
        time.sleep(0.2)
    lines = log.read_text()[before:].splitlines()
    assert len(lines) < 10, f"'No previous offsets found' alone came sixty times a second: {lines[:50]}"


STILL_S = 5.0


@pytest.fixture
def project(databases: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project's folder of events: two aggregates on one topic, and one with a topic of its own."""
    events = work_for(tmp_path / "project", monkeypatch)
    suffix = databases.source_db_url.name.rpartition("_")[2]
    declare(events, "item", "received", partitions=2)
    declare(events, "Return", "returned", partitions=2, topic=f"{databases.topic_prefix}.{suffix}.item")
    declare(events, "Order", "placed", partitions=3, topic=f"Sales-{suffix}")
    return events


@pytest.fixture
def several(project: Path, databases: Settings, stack: Stack) -> Iterator[Settings]:
    """The project's topics, and an outbox that takes undeclared events too; its connector is not made yet, and removed
    in the end.
    """
    del project
    with topics_of(databases, stack) as settings:
        remove_guard(settings)
        yield settings
        lifecycle.remove(settings, drop_slot=True)


def redeclare(project: Path, monkeypatch: pytest.MonkeyPatch, aggregate: str, *types: str, **options: object) -> Path:
    """Another version of the project, in which this aggregate is declared so."""
    copy = project.parent.with_name(f"{project.parent.name}+")
    shutil.copytree(project, work_for(copy, monkeypatch))
    declare(copy / "events", aggregate, *types, **options)
    return copy / "events"


def event(aggregate: str, key: str, version: int = 1) -> Row:
    types = {"item": "received", "Return": "returned", "Order": "placed"}
    payload = {"id": key, "version": version}
    return Row(aggregate, key, types.get(aggregate, "changed"), json.dumps(payload))


def history(keys: int, versions: int) -> list[Row]:
    """Events of keys that two aggregates share, numbered together, and of keys of the third, all mixed."""
    chance = random.Random(7)  # noqa: S311
    rows = []
    for version in range(1, versions + 1):
        for number in range(keys):
            rows += [event(chance.choice(["item", "Return"]), f"stock {number}", version)]
            rows += [event("Order", f"order {number}", version)]
    return rows


def insert_mixed(settings: Settings, rows: list[Row]) -> None:
    """The rows in transactions of random size."""
    chance, left = random.Random(8), list(rows)  # noqa: S311
    with closing(connect(settings, SourceRole.APP)) as connection, connection.cursor() as cursor:
        while left:
            size = chance.randint(1, 30)
            execute_values(cursor, INSERT, left[:size])
            connection.commit()
            del left[:size]


# Routing ----------------------------------------------------------------------------------------------------------


def test_every_event_is_on_its_topic_in_order_per_key(several: Settings) -> None:
    rows = history(keys=12, versions=60)
    insert_mixed(several, rows[:700])  # a snapshot relays these
    assert lifecycle.apply(several) == "created"
    insert_mixed(several, rows[700:])
    found = relayed(several)
    suffix = several.topic_prefix.rpartition(".")[2]
    expected = {"received": f"{several.topic_prefix}.item", "placed": f"Sales-{suffix}"}
    expected["returned"] = expected["received"]
    assert {(record.headers["eventType"], record.topic) for record in found} == set(expected.items())
    assert (len(found), duplicates(found), out_of_order(found)) == (len(rows), 0, [])
    assert len({(record.topic, record.partition) for record in found}) == 2 + 3

    prune.mark(several)
    markers = several.markers_topic
    wait_for("the markers", lambda: topics.last_stable_offsets(several, markers)[0] > 1, timeout_s=30)
    assert len(read(several)) == len(rows)
    own = {spec.name for spec in connectors.topic_specs(several)}
    names = AdminClient(client_config(several)).list_topics(timeout=30).topics
    made = {name for name in names if several.topic_prefix in name or several.connector in name}
    assert made == {name for name in own if not name.startswith("Sales-")}, "the relay has made none"


def test_a_missing_topic_stops_the_relay(several: Settings, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The task waits for the topic for good, and its state is RUNNING."""
    lifecycle.apply(several)
    insert(several, event("item", "a"))
    known = ids(several)
    relayed(several)
    insert(several, event("plain", "a"), event("own", "a"), event("item", "a", 2))
    with suppress(TimeoutError), closing(Log(several)) as log:
        wait_for("what must not come", lambda: len(log.read()) > len(known), timeout_s=STILL_S)
    assert lifecycle.status(several).is_running
    assert [record.id for record in read(several)] == known

    events = redeclare(project, monkeypatch, "plain")
    declare(events, "own", topic=f"{several.connector}-own")
    assert lifecycle.apply(several) == "updated"
    found = relayed(several)
    assert (len(found), duplicates(found)) == (4, 0)
    assert {record.topic for record in found if record.headers["eventType"] == "changed"} == {
        f"{several.topic_prefix}.plain",
        f"{several.connector}-own",
    }


def test_events_are_cloudevents_where_the_project_names_their_source(several: Settings, project: Path) -> None:
    """The package `cloudevents` reads their headers, and our own headers stay as they are."""
    file, source = project.parent / "pyproject.toml", "https://stock.example"
    lines = file.read_text()
    sent = [event("item", "a")._replace(traceparent=TRACEPARENT), event("Order", "b")]
    lifecycle.apply(several)
    plain = {record.key: record for record in send(several, *sent)}
    file.write_text(f'{lines}cloudevents-source = "{source}"\n')
    load.cache_clear()
    assert lifecycle.apply(several) == "updated"
    found = {record.key: record for record in send(several, *sent)}
    for one in sent:
        record, before = found[one.aggregateid], plain[one.aggregateid]
        assert record.headers == {**record.headers, **before.headers, "id": record.id}
        assert (record.topic, record.value) == (before.topic, before.value)
        # The package takes no header without a value, such as `traceparent` of no trace.
        headers = {name: value.encode() for name, value in record.headers.items() if value is not None}
        cloud = from_binary(KafkaMessage(headers, record.key.encode(), record.value.encode()), JSONFormat())
        assert (cloud.get_id(), cloud.get_specversion()) == (record.id, "1.0")
        assert (cloud.get_source(), cloud.get_type()) == (f"{source}/{one.aggregatetype}", one.type)
        assert (cloud.get_subject(), cloud.get_datacontenttype()) == (one.aggregateid, "application/json")
        [(occurred_at,)] = query(several, "SELECT occurred_at FROM outbox WHERE id = %s", parameters=[record.id])
        assert cloud.get_time() == occurred_at.replace(tzinfo=UTC)
        assert cloud.get_data() == json.loads(one.payload)

    file.write_text(lines)
    load.cache_clear()
    assert lifecycle.apply(several) == "updated"
    [again] = send(several, sent[0])
    assert again.headers.keys() == plain["a"].headers.keys()


# Topics -----------------------------------------------------------------------------------------------------------


def partitions(settings: Settings) -> dict[str, int]:
    return {
        name: topic.partitions for name, topic in topics.existing(settings, connectors.load(settings).topics).items()
    }


def test_apply_creates_missing_topics_alone(several: Settings, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lifecycle.apply(several)
    made = partitions(several)
    assert sorted(made.values()) == [2, 3]
    name = f"{several.topic_prefix}.bill"
    topics.create(several, [TopicSpec(name, 5, {"retention.ms": "7200000"})])
    events = redeclare(project, monkeypatch, "bill", partitions=2)
    declare(events, "claim", partitions=1)
    assert lifecycle.apply(several) == "unchanged", "default topics need no other routes"
    assert partitions(several) == {**made, name: 5, f"{several.topic_prefix}.claim": 1}
    assert topics.config(several, name)["retention.ms"] == "7200000"


def test_too_few_partitions_are_refused(several: Settings, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"{several.topic_prefix}.bill"
    topics.create(several, [TopicSpec(name, 2, {})])
    events = redeclare(project, monkeypatch, "bill", partitions=3)
    with raises("topic-partitions", f"topic {name} has 2 partitions; 3 are required", "`partitions` in aggregate.toml"):
        lifecycle.apply(several)
    assert lifecycle.status(several).connector == "MISSING"

    # Kafka tells no `.` from `_` in the names of metrics.
    topics.create(several, [TopicSpec(f"{several.connector}.bills", 1, {})])
    redeclare(events, monkeypatch, "bill", topic=f"{several.connector}_bills")
    with raises("topic-refused", f"{several.connector}_bills", f"{several.connector}.bills"):
        lifecycle.apply(several)


# An aggregate moves -----------------------------------------------------------------------------------------------


def test_prune_reads_former_topics_too(several: Settings, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lifecycle.apply(several)
    insert(several, *(event("Order", "a", version) for version in range(1, 4)), event("item", "a"))
    relayed(several)
    former = next(name for name in connectors.load(several).topics if name.startswith("Sales-"))
    redeclare(project, monkeypatch, "Order", "placed", topic=f"{former}-2", partitions=3)
    with raises("routes-differ", "outbox connect apply"):
        prune.prune(several, keep_hours=0)
    assert lifecycle.apply(several) == "updated"
    insert(several, event("Order", "a", 4))
    relayed(several, ids(several)[-1:])

    result = prune.prune(several, keep_hours=0, sinks=False)
    assert result == PruneResult(deleted=2, on_their_way=3), "nothing says that there was a former topic"
    kept_rows.stand(several, "dedup", former, topics.describe(several, former).id)
    assert prune.prune(several, keep_hours=0).deleted == 3
    assert ids(several) == []
