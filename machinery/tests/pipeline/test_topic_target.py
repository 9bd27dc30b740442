"""A sink whose target is a topic: exactly once within Kafka, wherever the process ends."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import closing

import pytest

from outbox.base.settings import Settings
from outbox.kafka import topics
from tests import items
from tests.support import topic_sinks
from tests.support.made_events import Event
from tests.support.sink_driver import Database
from tests.support.sink_process import Publisher
from tests.support.topic_reader import Log, Record, out_of_order, topic_of
from tests.support.topic_sinks import STEPS, catch_up, copies_of, units_of


@pytest.fixture
def targets(topic: Settings) -> Iterator[Settings]:
    """Settings of a chain with the target topics."""
    with topic_sinks.target_topics(topic):
        yield topic


def written(settings: Settings, name: str) -> list[Record]:
    """What a reader of committed records sees."""
    with closing(Log(settings, [name])) as log:
        return log.read()


def times(records: list[Record]) -> Counter[str]:
    """By event id, how many records there are."""
    return Counter(record.id for record in records)


def once(events: list[Event]) -> Counter[str]:
    return Counter({event.event_id for event in events})


def received(events: list[Event]) -> list[Event]:
    return [event for event in events if event.quantity > 0]


def test_each_event_is_written_once_with_its_key_its_headers_and_its_order(
    targets: Settings, publisher: Publisher
) -> None:
    some = publisher.events(60)
    publisher.send(some)
    publisher.send(publisher.events(20, keys=9), abort=True)
    publisher.send(some[:10])  # the relay sends them again
    catch_up(targets, "copies", "units")
    copies = written(targets, copies_of(targets))
    assert times(copies) == once(some)
    assert out_of_order(copies) == []
    by_id = {event.event_id: event for event in some}
    for record in copies:
        event = by_id[record.id]
        assert record.key == event.key
        assert {**json.loads(record.value), "occurred_at": 0} == {**event.payload(), "occurred_at": 0}
        assert (record.headers["eventType"], record.headers["schemaVersion"]) == (event.type, "1")
        assert (record.headers["origin"] or "").startswith(f"copies {topic_of(targets)}/")
    assert times(written(targets, units_of(targets))) == once(received(some))
    assert {record.key for record in written(targets, units_of(targets))} == {items.UNIT}
    catch_up(targets, "copies", "units")
    assert written(targets, copies_of(targets)) == copies


@pytest.mark.parametrize("step", STEPS)
def test_killed_behind_any_step_of_a_transaction_it_writes_each_event_once(
    targets: Settings, publisher: Publisher, step: str
) -> None:
    some = publisher.events(100)
    publisher.send(some)
    topic_sinks.killed(targets, step, 2, "copies", "units")
    before = Database(targets, "copies").positions(), Database(targets, "units").positions()
    publisher.send(publisher.events(0) + some[:5])
    catch_up(targets, "copies", "units")
    assert (Database(targets, "copies").positions(), Database(targets, "units").positions()) != before
    assert times(written(targets, copies_of(targets))) == once(some)
    assert times(written(targets, units_of(targets))) == once(received(some))
    assert topics.last_stable_offsets(targets, copies_of(targets)) == topics.high_watermarks(
        targets, copies_of(targets)
    ), "no transaction is open"
