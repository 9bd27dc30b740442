"""Recoveries of the relay: the slot, the connector's offsets, and an outbox that grows because nobody reads it."""

from __future__ import annotations

from outbox.base.settings import Settings
from outbox.kafka import topics
from outbox.relay import connectors, slot
from outbox.relay.rest import Rest
from outbox_lab.stack.postgres import Postgres
from tests.support import slots
from tests.support.outbox_rows import ids
from tests.support.rehearsal import Rehearse
from tests.support.topic_reader import delete_topics, duplicates, read, relayed


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
