"""Recoveries of a chain: its slot, its connector's offsets, an older source, its sink database, and its topics."""

from __future__ import annotations

import pytest
from confluent_kafka import Producer
from psycopg2 import extensions

from outbox.base.settings import Settings, SinkRole, SourceRole
from outbox.base.wait import wait_for
from outbox.kafka import topics
from outbox.kafka.clients import client_config
from outbox.relay import connectors, offsets, slot
from outbox.relay.rest import Rest
from outbox_lab.stack.postgres import Postgres
from tests.stock import Client
from tests.support import slots
from tests.support.made_events import nth_key
from tests.support.outbox_rows import ids
from tests.support.rehearsal import SINK, Rehearsal, Rehearse, failure_codes, run_client
from tests.support.sink_driver import Database
from tests.support.sink_process import catch_up, checkpoint, logged
from tests.support.topic_reader import delete_topics, drop_records, duplicates, read, relayed, topic_of


@pytest.fixture
def rehearsal(chain: Settings, client: Client) -> Rehearse:
    """The rehearsal of an entry of the runbook, by its title, on a chain that the test breaks."""
    return lambda title: Rehearsal(chain, client, title)


def stop_connector(settings: Settings) -> None:
    """Stop the task, and wait until nobody reads the slot."""
    Rest(settings).stop()
    slots.wait_released(settings)


def test_outbox_that_grows_because_the_relay_is_down(rehearsal: Rehearse) -> None:
    one = rehearsal("The relay is down, and the outbox grows")
    one.working(1, 2)
    stop_connector(one.settings)
    one.move(3, 4)
    assert len(ids(one.settings)) == 4
    assert "2 kept: on no topic" in one.run("prune", "--keep-hours", "0").stdout
    one.diagnosed()
    one.follow()
    relayed(one.settings)
    one.run("prune", "--keep-hours", "0")
    assert ids(one.settings) == []
    assert duplicates(read(one.settings)) == 0
    one.sound()


def test_slot_that_was_dropped(rehearsal: Rehearse, postgres: Postgres) -> None:
    one = rehearsal("The slot was dropped")
    one.working(1, 2)
    stop_connector(one.settings)
    slots.drop(one.settings)
    one.move(3)  # in no slot
    assert slot.read(one.settings) is None
    assert "does not exist" in one.run("connect", "apply", status=1).stderr
    one.diagnosed()
    one.follow()
    one.sound()


def test_slot_that_was_invalidated(rehearsal: Rehearse, postgres: Postgres) -> None:
    one = rehearsal("The slot was invalidated")
    one.working(1, 2)
    stop_connector(one.settings)
    one.move(3)
    slots.invalidate(one.settings, postgres)
    assert "was invalidated" in one.run("connect", "apply", status=1).stderr
    one.diagnosed()
    one.follow()
    one.sound()


def test_offsets_topic_that_was_lost(rehearsal: Rehearse) -> None:
    one = rehearsal("The topic of the connector's offsets is lost")
    one.working(1, 2)
    stop_connector(one.settings)
    lost = connectors.load(one.settings).offsets_topic
    delete_topics(one.settings, lost)
    one.move(3)
    assert not topics.exists(one.settings, lost)
    one.diagnosed()
    one.follow()
    assert topics.exists(one.settings, lost)
    one.sound()


def test_source_that_was_restored_from_an_older_backup(
    rehearsal: Rehearse, postgres: Postgres, superuser: extensions.cursor
) -> None:
    one = rehearsal("The source was restored from an older backup")
    name = one.settings.source_db_url.name
    one.working(1, 2)
    backup = run_client(postgres, one.settings, "pg_dump", name)
    backup = backup.replace("SET transaction_timeout = 0;\n", "")  # of a newer pg_dump than the server
    one.working(4, 5)
    lost = set(ids(one.settings)[-2:])
    one.run("connect", "remove")
    superuser.execute(f"DROP DATABASE {name} WITH (FORCE)")
    superuser.execute(f"CREATE DATABASE {name} OWNER {one.settings.role_name(SourceRole.OWNER)}")
    run_client(postgres, one.settings, "psql", "-qX", "-v", "ON_ERROR_STOP=1", "-d", name, given=backup)
    assert len(ids(one.settings)) == 2
    assert not lost & set(ids(one.settings))
    one.diagnosed()
    one.follow()
    assert {(found.code, found.count) for found in one.checked().findings} == {("foreign-events", 2)}
    one.working(7)  # its key gets a version again that a lost event had
    assert {(found.code, found.count) for found in one.checked().findings} == {("foreign-events", 2)}


def test_sink_database_that_was_restored_from_a_backup(rehearsal: Rehearse, superuser: extensions.cursor) -> None:
    one = rehearsal("The sink database was restored from a backup")
    one.working(1, 2)
    name, owner = one.settings.sink_db_url.name, one.settings.role_name(SinkRole.OWNER)
    superuser.execute(f"CREATE DATABASE {name}_backup TEMPLATE {name} OWNER {owner}")
    one.working(3, 4)
    superuser.execute(f"DROP DATABASE {name} WITH (FORCE)")
    superuser.execute(f"ALTER DATABASE {name}_backup RENAME TO {name}")
    assert Database(one.settings).applied() == 2, "the backup lacks two events"
    one.diagnosed()
    one.follow()
    assert Database(one.settings).applied() == 4
    assert checkpoint(one.settings, f"{SINK}.1").exists(), "the first one is ahead of the positions"
    one.sound()


def test_sink_that_was_stopped_longer_than_the_topic_keeps_events(rehearsal: Rehearse) -> None:
    one = rehearsal("A sink was stopped longer than the topic keeps events")
    one.working(1, 2)
    one.move(3, 4, 5)
    relayed(one.settings)
    ends = topics.last_stable_offsets(one.settings, topic_of(one.settings))
    for partition, end in ends.items():
        drop_records(one.settings, topic_of(one.settings), end, partition)
    assert topics.first_offsets(one.settings, topic_of(one.settings)) == ends
    assert failure_codes(catch_up(one.settings, SINK)) == ["events-lost"]
    one.diagnosed()
    one.follow()
    one.sound()


def test_topic_that_was_deleted_and_created_again(rehearsal: Rehearse) -> None:
    one = rehearsal("A topic of events was deleted")
    one.working(1, 2)
    before = topics.describe(one.settings, topic_of(one.settings)).id
    delete_topics(one.settings, topic_of(one.settings))
    one.move(3)
    assert not topics.exists(one.settings, topic_of(one.settings))
    first, later = one.entry.codes
    one.diagnosed(first)
    connector = connectors.load(one.settings)
    wait_for("a transaction that stays open", lambda: offsets.open_since(one.settings, connector), timeout_s=30)
    one.follow(slice(1))
    left_open = offsets.open_since(one.settings, connector)
    one.follow(slice(1, 2))
    assert left_open is None, "it was aborted, and the second command did not wait for its end"
    assert topics.describe(one.settings, topic_of(one.settings)).id != before
    relayed(one.settings)
    one.diagnosed(later)
    assert failure_codes(catch_up(one.settings, SINK)) == ["topic-recreated"]
    one.follow(slice(2, None))
    one.sound()
    assert Database(one.settings).applied() == 3 + 2, "nothing was applied twice"


def test_hostile_events(rehearsal: Rehearse) -> None:
    one = rehearsal("Hostile events arrive")
    one.working(1, 2)
    producer = Producer(client_config(one.settings))
    producer.produce(topic_of(one.settings), b"{", nth_key(0), headers={"eventType": b"received"})
    assert producer.flush(30) == 0
    one.move(3)
    relayed(one.settings)
    done = catch_up(one.settings, SINK)
    assert done.returncode == 0, done.stderr
    assert sum(int(str(line["dead"])) for line in logged(done, "applied")) == 1
    assert Database(one.settings).applied() == 3, "it held up nobody"
    assert "malformed-records" in {finding.code for finding in one.checked().findings}
    one.diagnosed()
    one.follow()
    one.sound()
