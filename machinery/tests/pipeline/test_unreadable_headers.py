"""A record with a header whose name is no UTF-8, which confluent-kafka cannot read: it is one without headers."""

from __future__ import annotations

import json

import pytest
from confluent_kafka import Message

from outbox.audit import check
from outbox.base.settings import Settings
from outbox.kafka import records, topics
from outbox.kafka.records import headers_of
from outbox.maintenance import retention
from outbox.relay import arrivals
from outbox.sink.decoding.records import Records
from tests.support import raw_producer
from tests.support.made_events import DECODER, sums, uuid7
from tests.support.record_corpus import GOOD, HEADERS, KEY
from tests.support.sink_driver import Database
from tests.support.sink_process import RANDOM, Publisher, catch_up
from tests.support.topic_reader import topic_of

MANY = 200  # more than a driver reads itself
OFTEN = 1_000  # then Python has optimised the call


def send_unreadable(topic: Settings, headers: dict[str, str] = HEADERS) -> None:
    """Publish a valid event with one more header, whose name is no UTF-8."""
    readable = [(name.encode(), text.encode()) for name, text in headers.items()]
    raw_producer.produce(topic, KEY.encode(), json.dumps(GOOD).encode(), [*readable, (b"\xff", b"x")])


@pytest.fixture
def message(topic: Settings) -> Message:
    """Such a record, as it is read."""
    send_unreadable(topic)
    (found,) = records.read(topic, topic_of(topic), topics.watermarks(topic, topic_of(topic)))
    return found


def test_it_has_no_headers(message: Message) -> None:
    for _ in range(OFTEN):
        headers_of(Message(headers=[("id", b"x")]))
    assert [headers_of(message), headers_of(message)] == [[], []]  # asked twice, confluent-kafka alone would crash


def test_it_is_no_event_for_any_reader(message: Message, topic: Settings) -> None:
    with pytest.raises(KeyError):
        arrivals.header_id(message)
    assert retention.deduplication_id(message) is None
    (dead,) = DECODER.decode(Records.of_messages([message])).dead
    assert (dead.event_id, dead.rejection.reason) == (None, "missing id")
    assert check.check(topic).topic(topic_of(topic)).malformed == {"missing id": 1}


def test_driver_and_executors_keep_it_as_the_same_dead_letter(
    topic: Settings, publisher: Publisher, database: Database
) -> None:
    headers = HEADERS | {"id": uuid7(RANDOM)}
    some = publisher.events(MANY)
    publisher.send(some)
    send_unreadable(topic, headers)
    by_executors = catch_up(topic)
    assert by_executors.returncode == 0, by_executors.stderr
    first = database.dead_letters()
    send_unreadable(topic, headers)
    by_driver = catch_up(topic)
    assert by_driver.returncode == 0, by_driver.stderr
    assert list(first.values()) == ["missing id"]
    assert database.dead_letters() == first
    assert database.totals() == sums(some)
