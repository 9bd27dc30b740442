"""Recoveries from what Kafka has lost: Connect's own topics, and everything. The tests share a stack to break."""

from __future__ import annotations

import shutil

import pytest

from outbox.base.settings import Settings
from outbox.kafka import topics
from outbox.relay import lifecycle
from outbox_lab.stack.stack import Stack
from tests.support.rehearsal import SINK, Rehearsal, Rehearse, client_of, failure_codes
from tests.support.sink_driver import Database
from tests.support.sink_process import catch_up
from tests.support.topic_reader import delete_topics, duplicates, read, topic_of

pytestmark = pytest.mark.recovery

OF_CONNECT = ("outbox.connect.configs", "outbox.connect.offsets", "outbox.connect.status")


@pytest.fixture
def rehearsal(home_stack: Stack) -> Rehearse:
    """The rehearsal of an entry on the stack of these tests."""
    settings = home_stack.settings
    lifecycle.apply(settings)
    return lambda title: Rehearsal(settings, client_of(settings), title)


def has_connector(settings: Settings) -> bool:
    return lifecycle.status(settings).connector != "MISSING"


def test_config_topic_of_connect_that_was_lost(home_stack: Stack, rehearsal: Rehearse) -> None:
    one = rehearsal("Connect's own topics are lost")
    one.working(1, 2)
    home_stack.part("connect").stop()
    delete_topics(one.settings, *OF_CONNECT)
    one.move(3)
    home_stack.up()
    assert not has_connector(one.settings)
    one.diagnosed()
    one.follow()
    one.sound()
    assert duplicates(read(one.settings)) == 0


def test_kafka_that_has_lost_all_its_data(home_stack: Stack, rehearsal: Rehearse) -> None:
    one = rehearsal("Kafka's data is lost entirely")
    one.working(1, 2)
    one.run("prune", "--keep-hours", "0")  # on no topic and in no outbox soon, but applied
    one.working(4)
    applied = Database(one.settings).applied()
    home_stack.part("connect").stop()
    home_stack.part("kafka").stop()
    one.move(5)
    shutil.rmtree(home_stack.part("kafka").folder / "data")
    home_stack.up()
    assert not topics.exists(one.settings, topic_of(one.settings))
    one.diagnosed()
    one.follow(slice(1))
    assert failure_codes(catch_up(one.settings, SINK)) == ["topic-recreated"]
    one.follow(slice(1, None))
    assert Database(one.settings).applied() == applied + 1, "nothing was applied twice"
    one.sound()
