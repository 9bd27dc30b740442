"""Recoveries of the sinks: their database, their topics, and what others write to these."""

from __future__ import annotations

from confluent_kafka import Producer
from psycopg2 import extensions

from outbox.base.settings import SinkRole
from outbox.base.wait import wait_for
from outbox.kafka import topics
from outbox.kafka.clients import client_config
from outbox.relay import connectors, offsets
from tests.support.made_events import nth_key
from tests.support.rehearsal import SINK, Rehearse, failure_codes
from tests.support.sink_driver import Database
from tests.support.sink_process import catch_up, checkpoint, logged
from tests.support.topic_reader import delete_topics, drop_records, relayed, topic_of


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
