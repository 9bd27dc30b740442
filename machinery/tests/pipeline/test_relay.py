"""From the outbox table to the topics: nothing is lost at first start, the connector is applied idempotently, and what
Debezium would not notice is refused.
"""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import requests
from confluent_kafka import Producer
from psycopg2.extras import execute_values

from outbox.base.database import connect
from outbox.base.settings import Settings, SourceRole
from outbox.base.wait import wait_for
from outbox.kafka.clients import client_config
from outbox.migrations.migrate import migrate
from outbox.relay import connectors, lifecycle, slot
from outbox.relay.rest import Rest
from outbox_lab.stack import config
from outbox_lab.stack.postgres import Postgres
from outbox_lab.stack.stack import Stack
from outbox_lab.testing.command import outbox
from outbox_lab.testing.failures import raises
from tests.support import slots, suite
from tests.support.outbox_rows import INSERT, ids, insert, row, writing
from tests.support.topic_reader import duplicates, out_of_order, read, relayed


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
    assert [json.loads(record.value)["version"] for record in relayed(unapplied)] == [1, 2, 3, 4]


def test_a_second_snapshot_may_repeat_an_event_with_exactly_once_on(chain: Settings) -> None:
    # Until its first event is relayed a connector has no offset stored: started again, it takes its snapshot again,
    # beside a slot that is there. What commits after it has looked at the log and before it reads the table is in both.
    rest = Rest(chain)
    rest.stop()
    waiting = "SELECT count(*) FROM pg_locks WHERE relation = 'outbox'::regclass AND NOT granted"
    with closing(connect(chain, SourceRole.OWNER)) as owner, owner.cursor() as cursor:
        cursor.execute("LOCK TABLE outbox IN ACCESS EXCLUSIVE MODE")

        def is_blocked() -> bool:
            cursor.execute(waiting)
            return bool(cursor.fetchall() != [(0,)])

        rest.resume()
        wait_for("the snapshot to wait for the table", is_blocked, timeout_s=30)
        execute_values(cursor, INSERT, [row()])
        owner.commit()
    assert lifecycle.status(chain).mode.startswith("exactly-once (")
    wait_for("the event to come twice", lambda: duplicates(read(chain)) == 1, timeout_s=30)
    insert(chain, row())
    assert sorted({record.id for record in relayed(chain)}) == ids(chain)
    assert duplicates(read(chain)) == 1


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
    assert_relays(chain)


def test_stopped_or_removed_it_goes_on_where_it_was_and_forgotten_it_begins_again(chain: Settings) -> None:
    insert(chain, row())
    relayed(chain)
    url = f"{chain.connect_url}/connectors/{chain.connector}/stop"
    assert requests.put(url, auth=chain.connect_login, timeout=10).ok
    wait_for("it to stop", lambda: lifecycle.status(chain).tasks == [], timeout_s=30)
    assert not lifecycle.status(chain).is_running
    lifecycle.apply(chain)
    assert_relays(chain)

    assert lifecycle.remove(chain) is True
    assert lifecycle.status(chain).connector == "MISSING"
    assert lifecycle.remove(chain) is False
    insert(chain, row())
    lifecycle.apply(chain)
    assert sorted(record.id for record in relayed(chain)) == ids(chain)
    assert duplicates(read(chain)) == 0

    lifecycle.remove(chain, drop_slot=True)
    lifecycle.apply(chain)
    insert(chain, row())
    relayed(chain)
    assert len(read(chain)) == 3 + 3 + 1


# What Debezium would not notice -----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["made again", "read by another"])
def test_a_slot_that_has_lost_events_is_refused_until_told_to_forget(
    chain: Settings, postgres: Postgres, how: str
) -> None:
    insert(chain, row())
    relayed(chain)
    lifecycle.remove(chain)
    slots.wait_released(chain)
    if how == "made again":
        slots.drop(chain)
    insert(chain, row())  # in no slot, or in the slot until it moves on
    if how == "made again":
        create = f"SELECT pg_create_logical_replication_slot('{chain.connector}', 'pgoutput')"
        postgres.psql(create, chain.source_db_url.name)
    else:
        slots.advance(chain)
    with raises("slot-ahead", "outbox connect remove --drop-slot"):
        lifecycle.apply(chain)
    lifecycle.remove(chain, drop_slot=True)
    lifecycle.apply(chain)
    assert {record.id for record in relayed(chain)} == set(ids(chain))


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


def test_a_slot_ahead_whose_log_is_released_is_refused(chain: Settings, postgres: Postgres) -> None:
    insert(chain, row())
    relayed(chain)
    lifecycle.remove(chain)
    slots.wait_released(chain)
    stored = slot.read(chain)
    assert stored is not None

    def released() -> bool:
        postgres.psql("CHECKPOINT")  # logs the running transactions, on every version
        slots.advance(chain)
        now = slot.read(chain)
        return now is not None and now.restart_lsn > stored.confirmed_lsn

    wait_for("the log to be released", released, timeout_s=30)
    with raises("slot-released", "outbox connect remove --drop-slot"):
        lifecycle.apply(chain)
    lifecycle.remove(chain, drop_slot=True)
    lifecycle.apply(chain)
    assert {record.id for record in relayed(chain)} == set(ids(chain))


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


# The log ----------------------------------------------------------------------------------------------------------


WINDOW_S = 4.0
CHECKS_PER_S = 5
LINES_MAX = 10  # "No previous offsets found" alone came sixty times a second


def test_an_idle_connector_and_health_checks_log_next_to_nothing(chain: Settings, stack: Stack) -> None:
    rest, log = Rest(chain), stack.part("connect").log_file

    def is_polling() -> bool:
        return "Processing messages" in log.read_text().rpartition(f"slot.name = {chain.connector}")[2]

    wait_for("the task to poll", is_polling, timeout_s=60)
    assert rest.offset() is None, "no event is relayed yet"
    before = len(log.read_text())
    end = time.monotonic() + WINDOW_S
    while time.monotonic() < end:
        assert stack.part("connect").is_ready()
        assert rest.state().is_running
        time.sleep(1 / CHECKS_PER_S)
    lines = log.read_text()[before:].splitlines()
    assert len(lines) < LINES_MAX, lines[:50]
