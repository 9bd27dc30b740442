"""Following a topic in ranges that somebody else plans: each has its committed records, whatever lies between them."""

from __future__ import annotations

import random
import threading
import time
import uuid
from collections.abc import Iterator, Mapping

import pytest
from confluent_kafka import Producer

from outbox.base.errors import Failure
from outbox.base.settings import Settings
from outbox.base.wait import timeout_scale, wait_for
from outbox.kafka import records, topics
from outbox.kafka.clients import client_config
from outbox.kafka.follower import AHEAD_MAX_RECORDS, Closed, Follower
from outbox_lab.testing.failures import raises
from outbox_lab.testing.helpers import chosen_seed
from tests.support.topic_reader import drop_records, topic_of

TIMEOUT_S = 30


@pytest.fixture
def follower(topic: Settings) -> Iterator[Follower]:
    made = Follower(topic, topic_of(topic))
    yield made
    made.close()


@pytest.fixture
def transactions(topic: Settings) -> Producer:
    """A producer that writes in transactions."""
    producer = Producer({**client_config(topic), "transactional.id": f"test-{uuid.uuid4()}"})
    producer.init_transactions(TIMEOUT_S)
    return producer


@pytest.fixture
def short_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A partition that sends nothing fails soon."""
    monkeypatch.setattr(records, "SILENCE_TIMEOUT_S", 1.0)


def write(producer: Producer, topic: Settings, *values: str, partition: int = 0, commit: bool = True) -> None:
    """Write these values in a transaction, which takes one more offset for its end."""
    producer.begin_transaction()
    for value in values:
        producer.produce(topic_of(topic), value, partition=partition)
    producer.flush(TIMEOUT_S)
    if commit:
        producer.commit_transaction(TIMEOUT_S)
    else:
        producer.abort_transaction(TIMEOUT_S)


def read(follower: Follower, start: Mapping[int, int], end: Mapping[int, int]) -> list[str]:
    return [(message.value() or b"").decode() for message in follower.read(start, end)]


@pytest.fixture
def traffic(topic: Settings) -> Iterator[threading.Thread]:
    """Somebody who writes to partition 1 all the time, until the test has ended or ``TIMEOUT_S`` has passed."""
    ended = threading.Event()

    def write_on() -> None:
        producer, until = Producer(client_config(topic)), time.monotonic() + TIMEOUT_S * timeout_scale()
        while not ended.is_set() and time.monotonic() < until:
            producer.produce(topic_of(topic), "foreign", partition=1)
            producer.flush(TIMEOUT_S)

    thread = threading.Thread(target=write_on)
    thread.start()
    wait_for("the first record", lambda: end_of(topic)[1] > 0, timeout_s=TIMEOUT_S)
    yield thread
    ended.set()
    thread.join()


def end_of(topic: Settings) -> dict[int, int]:
    return dict(topics.last_stable_offsets(topic, topic_of(topic)))


@pytest.mark.parametrize("ahead_max", [1_000, 1])
def test_random_ranges_have_what_one_read_of_everything_has(
    topic: Settings, transactions: Producer, follower: Follower, monkeypatch: pytest.MonkeyPatch, ahead_max: int
) -> None:
    monkeypatch.setattr("outbox.kafka.follower.AHEAD_MAX_RECORDS", ahead_max)
    chance = random.Random(chosen_seed())  # noqa: S311
    for _ in range(40):
        values = [uuid.uuid4().hex for _ in range(chance.randrange(1, 30))]
        write(transactions, topic, *values, partition=chance.randrange(3), commit=chance.random() < 0.8)
    end = end_of(topic)
    place = {
        (one.partition() or 0, one.offset() or 0)
        for one in records.read(topic, topic_of(topic), {p: (0, o) for p, o in end.items()})
    }
    at = dict.fromkeys(end, 0)
    for _ in range(min(60, 15 * ahead_max)):  # a pause costs a moment
        if chance.random() < 0.2:
            at = {partition: chance.randint(0, last) for partition, last in end.items()}
        to = {partition: chance.randint(offset, min(end[partition], offset + 40)) for partition, offset in at.items()}
        found = [(one.partition() or 0, one.offset() or 0) for one in follower.read(at, to)]
        assert set(found) == {
            (partition, offset) for partition, offset in place if at[partition] <= offset < to[partition]
        }
        assert len(set(found)) == len(found)
        for partition in to:
            offsets = [offset for of, offset in found if of == partition]
            assert offsets == sorted(offsets)
        at = to


def test_a_read_that_was_not_finished_is_begun_anew(
    topic: Settings, transactions: Producer, follower: Follower
) -> None:
    write(transactions, topic, "a", "b", "c")
    reading = follower.read({0: 0}, {0: 4})
    assert (next(reading).value() or b"").decode() == "a"
    del reading
    assert read(follower, {0: 0}, {0: 4}) == ["a", "b", "c"]


def test_what_the_topic_has_dropped_is_no_empty_range(
    topic: Settings, transactions: Producer, follower: Follower
) -> None:
    write(transactions, topic, "a", "b", "c")
    drop_records(topic, topic_of(topic), 2)
    for reads in (
        lambda: read(follower, {0: 0}, {0: 4}),
        lambda: list(records.batches(topic, topic_of(topic), {0: (0, 4)}, require_all=True)),
    ):
        with raises("events-lost"):
            reads()
    assert [one.offset() for one in records.read(topic, topic_of(topic), {0: (0, 4)})] == [2]
    assert read(follower, {0: 2}, {0: 4}) == ["c"]


@pytest.mark.usefixtures("short_silence")
def test_a_range_beyond_the_end_is_not_read_from_the_beginning(topic: Settings, transactions: Producer) -> None:
    """As when a topic is created again after its offsets were looked up: the client begins at the earliest record."""
    write(transactions, topic, "a", "b", "c")
    found: list[int | None] = []
    with pytest.raises(Failure) as failure:
        found += (one.offset() for one in records.read(topic, topic_of(topic), {0: (500, 600)}))
    assert (failure.value.code, found) == ("topic-silent", [])


@pytest.mark.usefixtures("short_silence")
@pytest.mark.parametrize("reader", ["follower", "range"])
def test_records_of_another_partition_do_not_hide_a_silent_one(
    topic: Settings, follower: Follower, traffic: threading.Thread, reader: str
) -> None:
    with raises("topic-silent"):
        if reader == "follower":
            read(follower, {0: 0, 1: 0}, {0: 1, 1: 1})
        else:
            list(records.read(topic, topic_of(topic), {0: (0, 1), 1: (0, 1)}))
    assert traffic.is_alive()


@pytest.mark.usefixtures("short_silence")
def test_what_is_held_for_later_is_bounded_and_is_there_later(
    topic: Settings, transactions: Producer, follower: Follower
) -> None:
    values = [f"later {number}" for number in range(5 * AHEAD_MAX_RECORDS)]
    write(transactions, topic, "a")
    write(transactions, topic, *values, partition=1)
    assert read(follower, {0: 0, 1: 0}, {0: 2, 1: 1}) != []
    with pytest.raises(Failure, match="no record"):
        read(follower, {0: 2, 1: 1}, {0: 3, 1: 2})
    assert follower.positions([1])[1] <= AHEAD_MAX_RECORDS + 10
    write(transactions, topic, "b")
    found = read(follower, {0: 2, 1: 1}, {0: 3, 1: 2})
    found += read(follower, {0: 3, 1: 2}, {0: 4, 1: len(values) + 1})
    assert sorted(found) == sorted(["b", *values[1:]])


def test_closing_it_ends_a_read_that_waits(topic: Settings, transactions: Producer, follower: Follower) -> None:
    write(transactions, topic, "a")
    begun, ended = threading.Event(), threading.Event()

    def wait() -> None:
        reading = follower.read({0: 0}, {0: 9})  # nobody has written the others
        next(reading)
        begun.set()
        with pytest.raises(Closed):
            next(reading)
        ended.set()

    thread = threading.Thread(target=wait)
    thread.start()
    assert begun.wait(TIMEOUT_S)
    follower.close()
    thread.join(TIMEOUT_S)
    assert ended.is_set()


@pytest.mark.usefixtures("short_silence")
@pytest.mark.parametrize("reader", ["follower", "range"])
def test_a_range_may_end_with_an_aborted_record(
    topic: Settings, transactions: Producer, follower: Follower, reader: str
) -> None:
    """Another producer's transaction is open: what lies behind its first record is not to be read."""
    other = Producer({**client_config(topic), "transactional.id": f"test-{uuid.uuid4()}"})
    other.init_transactions(TIMEOUT_S)
    write(transactions, topic, "a")  # offset 0, marker 1
    transactions.begin_transaction()
    transactions.produce(topic_of(topic), "never", partition=0)  # 2
    transactions.flush(TIMEOUT_S)
    other.begin_transaction()
    other.produce(topic_of(topic), "b", partition=0)  # 3
    other.flush(TIMEOUT_S)
    transactions.abort_transaction(TIMEOUT_S)  # 4
    assert end_of(topic)[0] == 3

    def found(start: int, end: int) -> list[str]:
        if reader == "follower":
            return read(follower, {0: start}, {0: end})
        return [(one.value() or b"").decode() for one in records.read(topic, topic_of(topic), {0: (start, end)})]

    assert found(0, 2) == ["a"]
    assert found(2, 3) == []
    other.commit_transaction(TIMEOUT_S)  # 5
    assert found(3, 6) == ["b"]
