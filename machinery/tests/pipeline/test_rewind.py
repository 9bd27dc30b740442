"""Rewinding: where a sink will begin, and what is refused. That it then does is shown in test_sink_stream.py."""

from __future__ import annotations

from contextlib import closing
from datetime import UTC, datetime, timedelta

import confluent_kafka
import pytest
from confluent_kafka.admin import AdminClient

from outbox.base.database import connect, query
from outbox.base.settings import Settings, SinkRole
from outbox.base.wait import wait_for
from outbox.kafka import topics
from outbox.kafka.clients import client_config
from outbox.kafka.spec import TopicSpec
from outbox.sink.remembering import positions
from outbox.sink.remembering.positions import Beginning
from outbox.sink.repair import rewind
from outbox.sink.repair.rewind import Move, TopicPartition
from outbox_lab.testing.command import outbox
from outbox_lab.testing.failures import raises
from tests.support.made_events import sums
from tests.support.sink_driver import Database, sink_on
from tests.support.sink_process import Publisher, applied_until, catch_up, logged
from tests.support.topic_reader import delete_topics, topic_of


@pytest.fixture
def applied(topic: Settings) -> Settings:
    """A topic with five records in partition 0, of which a sink, whose driver has ended, has applied four."""
    applied_until(topic, 4)
    return topic


def beginning(settings: Settings) -> Beginning:
    with closing(connect(settings, SinkRole.WRITER)) as connection, connection.cursor() as cursor:
        return positions.beginning(cursor, "dedup")


def test_a_moment_after_events_that_were_not_applied_skips_none(applied: Settings) -> None:
    moment, place = datetime.now(UTC), TopicPartition(topic_of(applied), 0)
    producer = confluent_kafka.Producer(client_config(applied))
    producer.produce(place.topic, "later", partition=0, headers={"id": "1"})
    producer.flush(30)
    assert topics.offsets_since(applied, place.topic, moment) == {0: 5}
    assert rewind.to_datetime(applied, "dedup", moment)[place] == Move(position=4, begin=4)


def test_recreated_topic_needs_its_former_partitions(applied: Settings) -> None:
    name = topic_of(applied)
    delete_topics(applied, name)
    topics.create(applied, [TopicSpec(name, 1, {})])
    with raises("topic-partitions"):
        rewind.accept_recreated(applied, "dedup")
    assert beginning(applied) == Beginning(0, {})
    delete_topics(applied, name)
    topics.create(applied, [TopicSpec(name, 2, {})])
    assert rewind.accept_recreated(applied, "dedup") == [name]
    assert beginning(applied) == Beginning(1, {name: {0: 0, 1: 0}})


def test_a_running_sink_is_not_rewound(applied: Settings) -> None:
    moves = rewind.to_earliest(applied, "dedup")
    with closing(connect(applied, SinkRole.WRITER)) as connection:
        sink_on(connection)
        with raises("sink-has-driver"):
            rewind.rewind(applied, "dedup", moves)
    assert beginning(applied) == Beginning(0, {})


def test_a_sink_that_was_swapped_while_the_command_asked_is_not_moved(applied: Settings) -> None:
    """By a rebuild from the topic, whose copy has read less."""
    for moves in (rewind.to_positions(applied, "dedup"), rewind.to_earliest(applied, "dedup")):
        query(applied, SinkRole.WRITER, "UPDATE positions SET next_offset = 2 WHERE partition = 0")
        with raises("sink-moved"):
            rewind.rewind(applied, "dedup", moves)
        assert (Database(applied).positions(), beginning(applied)) == ({0: 2, 1: 0}, Beginning(0, {}))
        query(applied, SinkRole.WRITER, "UPDATE positions SET next_offset = 4 WHERE partition = 0")


def rewound(settings: Settings, *words: str) -> tuple[int, str, str]:
    """`outbox rewind` of the sink: its status, and what it said on both streams."""
    done = outbox("rewind", "dedup", *words, home=settings.home, **settings.as_env())
    return done.returncode, done.stdout, done.stderr


def test_a_sink_reads_from_a_moment_in_the_middle(topic: Settings) -> None:
    publisher = Publisher(topic)
    early, late = publisher.events(30), publisher.events(20)
    publisher.send(early)
    between = datetime.now(UTC)
    wait_for("the clock to go on", lambda: datetime.now(UTC) > between + timedelta(milliseconds=5), timeout_s=5)
    publisher.send(late)
    assert catch_up(topic).returncode == 0
    status, _, complaint = rewound(topic, "--yes", "--to-datetime", between.isoformat())
    assert status == 0, complaint
    done = catch_up(topic)
    assert done.returncode == 0, done.stderr
    lines = logged(done, "applied")
    assert sum(int(str(line["rows"])) for line in lines) == sum(int(str(line["duplicates"])) for line in lines) == 20
    assert Database(topic).totals() == sums([*early, *late])


def test_what_the_topic_has_dropped_is_given_up_only_if_told_so(applied: Settings) -> None:
    admin = AdminClient(client_config(applied))
    for future in admin.delete_records([confluent_kafka.TopicPartition(topic_of(applied), 0, 5)]).values():
        future.result(10)
    position = {0: 4, 1: 0}

    def run(*words: str) -> str:
        return "".join(rewound(applied, "--yes", *words)[1:])

    assert "would replay nothing" in run("--to-earliest")
    assert Database(applied).positions() == position
    told = run("--to-earliest", "--skip-dropped")
    assert "/0: from offset 5, giving up 4 to 4" in told
    assert "begins there at its next start" in told
    assert Database(applied).positions() == {0: 5, 1: 0}
    assert catch_up(applied).returncode == 0


def test_the_command(applied: Settings) -> None:
    names = {"OUTBOX_SINK_DB_URL": str(applied.sink_db_url), "OUTBOX_TOPIC_PREFIX": applied.topic_prefix}

    def run(*words: str) -> tuple[int, str]:
        done = outbox("rewind", *words, home=applied.home, **names)
        assert "Traceback" not in done.stderr
        return done.returncode, done.stdout + done.stderr

    assert run("dedup")[0] == 2
    assert run("dedup", "--to-datetime", "tomorrow")[0] == 2
    assert run("dedup", "--accept-recreated", "--to-earliest")[0] == 2
    assert run("dedup", "--accept-recreated", "--skip-dropped")[0] == 2
    assert "no topic was created again" in run("dedup", "--accept-recreated", "--yes")[1]
    assert "no sink is called other" in run("other", "--to-earliest", "--yes")[1]
    status, told = run("dedup", "--to-earliest")
    assert (status, beginning(applied)) == (130, Beginning(0, {})), "nobody has confirmed it"
    assert f"partition {topic_of(applied)}/0: from offset 0, replaying 4" in told
    status, told = run("dedup", "--to-earliest", "--yes")
    assert (status, beginning(applied)) == (0, Beginning(1, {topic_of(applied): {0: 0, 1: 0}}))
    assert "with checkpoint 1" in told
    later = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    assert run("dedup", "--to-datetime", later, "--yes")[0] == 1, "nothing to read again"
    status, told = run("dedup", "--to-positions", "--yes")
    assert (status, beginning(applied)) == (0, Beginning(2, {topic_of(applied): {0: 4, 1: 0}}))
    assert Database(applied).positions() == {0: 4, 1: 0}, "what is applied stays applied"
