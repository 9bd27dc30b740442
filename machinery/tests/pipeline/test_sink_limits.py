"""How sinks read: ranges of a topic have their committed records, whatever lies between them; and memory is bounded,
whatever the records are.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from multiprocessing.queues import Queue
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import Producer
from pyspark.sql import SparkSession

from outbox.base.errors import Failure
from outbox.base.settings import Settings
from outbox.base.wait import timeout_scale, wait_for
from outbox.kafka import records, topics
from outbox.kafka.clients import client_config
from outbox.kafka.follower import AHEAD_MAX_RECORDS, Follower
from outbox.kafka.records import Part
from outbox.sink import discovery
from outbox.sink.decoding.batch import Batch, Chunking, Returned
from outbox.sink.spark import reader
from outbox_lab.testing.failures import raises
from outbox_lab.testing.helpers import chosen_seed
from tests.support.made_events import DAY_MS, MAIN, NOW_MS, TOPIC, uuid7
from tests.support.sink_driver import Database
from tests.support.sink_process import Publisher, catch_up, catch_up_alone, logged
from tests.support.topic_reader import drop_records, topic_of

RANDOM = Random(41)  # noqa: S311
TIMEOUT_S = 180
# Several times the heap that the sink gets, in one batch.
HEAP_MIB = 512
INVALID_RECORDS, INVALID_BYTES = 33_000, 50_000


LARGE_RECORDS, LARGE_BYTES = 400, 900_000
# 480 to 580, as the client has read ahead more or less; without the bounds it would be some 2,700.
MEMORY_MAX_MIB = 700


def produce(settings: Settings, count: int, value: bytes, more: dict[str, bytes] | None = None, at: int = -1) -> None:
    """Records that are no events, each with an id of its own, and with more headers; in all partitions, or in one."""
    producer = Producer({**client_config(settings), "queue.buffering.max.kbytes": 1 << 20, "compression.type": "lz4"})
    for number in range(count):
        headers: dict[str, str | bytes | None] = {"id": uuid7(RANDOM), "eventType": "x", "schemaVersion": "1"}
        headers.update(more or {})
        producer.produce(topic_of(settings), value, str(number), at, headers=headers)
        producer.poll(0)
        if number % 100 == 0:
            producer.flush(60)
    assert producer.flush(120) == 0


def test_a_batch_of_garbage_larger_than_the_heap_is_set_aside(topic: Settings) -> None:
    produce(topic, INVALID_RECORDS, json.dumps({"note": "x" * INVALID_BYTES}).encode(), at=0)
    publisher = Publisher(topic)
    publisher.send(publisher.events(10))
    small = topic.replace(sink_driver_memory=f"{HEAP_MIB}m")
    done = catch_up_alone(small)
    assert done.returncode == 0, done.stderr[-2000:]
    dead = [int(str(line["dead"])) for line in logged(done, "applied") if line["batch"] == 0]
    assert sum(dead) == INVALID_RECORDS, "one batch"
    ((letters, size),) = Database(topic).query("SELECT count(*), sum(octet_length(value)) FROM dead_letters")
    assert (letters, int(str(size)) > INVALID_RECORDS * INVALID_BYTES) == (INVALID_RECORDS, True)
    assert Database(topic).applied() == 10


def most_mib() -> float:
    """The most memory that this process has had (getrusage begins with its parent's)."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def peak_mib(settings: Settings, found: Queue[tuple[int, float]]) -> None:
    """How many records of the topic a task returns, in all that it gets, and by how much its memory grows."""
    before_mib, count, name = most_mib(), 0, topic_of(settings)
    marks = topics.watermarks(settings, name)
    part = Part(name, {at: first for at, (first, _) in marks.items()}, {at: end for at, (_, end) in marks.items()})
    task = reader.ReadTask.of_sink(settings, MAIN.chunking(TOPIC), name, reader.PART_MAX_BYTES)
    while part.count:
        read = task(part)
        assert isinstance(read, reader.Read)
        assert read.size_bytes < 2 * reader.PART_MAX_BYTES
        count += read.chunk.dead_count
        part = part.behind({**part.start, **(part.end if read.reached is None else read.reached)})
    found.put((count, most_mib() - before_mib))


def test_a_task_holds_few_of_the_largest_records_at_once(topic: Settings) -> None:
    produce(topic, LARGE_RECORDS, b"x" * (LARGE_BYTES // 2), {"large": b"x" * (LARGE_BYTES // 2)})
    context = multiprocessing.get_context("spawn")
    found: Queue[tuple[int, float]] = context.Queue()
    process = context.Process(target=peak_mib, args=(topic, found), daemon=True)
    process.start()
    process.join(TIMEOUT_S)
    assert process.exitcode == 0
    count, grown_mib = found.get(timeout=TIMEOUT_S)
    assert count == LARGE_RECORDS
    assert grown_mib < MEMORY_MAX_MIB


def read_all(topic: Settings, spark: SparkSession, transform: Any = None) -> list[Batch]:
    """All records of the topic, in as many batches as the reader makes of them."""
    name, spec = topic_of(topic), discovery.sinks(topic)["dedup"]
    if transform is not None:
        spec = replace(spec, job=replace(spec.job, transform="not:loaded"))
    end = topics.last_stable_offsets(topic, name)
    found: list[Batch] = []
    with closing(reader.Reader(topic, spec, {name: "x"}, transform)) as reading:
        waiting = reading.parts([Part(name, dict.fromkeys(end, 0), end)])
        while waiting:
            found.append(reading.read(spark, waiting))
    assert all(one.end == following.start for one, following in pairwise(found))
    return found


def test_a_part_has_as_much_as_fits(topic: Settings, spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records of which a part has no room for more than a few, and then small ones."""
    monkeypatch.setattr(reader, "PART_MAX_BYTES", 1_000_000)
    large = 4 * reader.DRIVER_MAX_RECORDS
    produce(topic, large, b"x" * 50_000)
    publisher = Publisher(topic)
    some = publisher.events(12 * reader.DRIVER_MAX_RECORDS)
    publisher.send(some)
    found = read_all(topic, spark)
    counts = [batch.chunk.count + batch.chunk.dead_count for batch in found]
    assert counts[0] < large, "the first part did not fit"
    assert max(counts) > counts[0], "they grow again"
    assert sum(batch.chunk.dead_count for batch in found) == large
    assert sum(batch.chunk.count for batch in found) == len(some)
    assert len(found) < 40, "they are not read one by one"


def test_the_driver_reads_few_records_too(
    topic: Settings, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few records may need much memory: by their headers, a hundred times of what they have on the topic."""
    monkeypatch.setattr(reader, "PART_MAX_BYTES", 1_000_000)
    headers = {f"{number:05}": b"" for number in range(20_000)}
    produce(topic, 30, b"x", headers)
    found = read_all(topic, spark)
    assert sum(batch.chunk.dead_count for batch in found) == 30
    assert max(batch.chunk.dead_count for batch in found) < 10, "some at once"


class Widening:
    """A transform that returns much more than it gets."""

    def apply(self, events: pa.Table) -> Returned:
        return Returned(events.append_column("more", pa.array(["x" * 20_000] * events.num_rows)))

    apply_to_many = apply


def test_rows_of_a_transform_count_too(topic: Settings, spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "PART_MAX_BYTES", 4_000_000)
    monkeypatch.setattr(reader, "TASK_MIN_RECORDS", 400)
    publisher = Publisher(topic)
    publisher.send(publisher.events(2_000))
    sizes = [batch.returned.rows.nbytes for batch in read_all(topic, spark, Widening()) if batch.returned is not None]
    assert sizes[0] > reader.PART_MAX_BYTES, "nobody knew"
    assert max(sizes[1:]) < 1.1 * reader.PART_MAX_BYTES


def test_tasks_read_the_next_part_while_a_transform_runs(
    topic: Settings, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A transform that does not return before its next part but one is read."""
    monkeypatch.setattr(reader, "TASK_MIN_RECORDS", 400)
    publisher = Publisher(topic)
    publisher.send(publisher.events(2_000))
    parts, of_sink = list[str](), reader.ReadTask.of_sink

    def begun(settings: Settings, chunking: Chunking, topic: str, max_bytes: int) -> reader.ReadTask:
        parts.append(topic)
        return of_sink(settings, chunking, topic, max_bytes)

    monkeypatch.setattr(reader.ReadTask, "of_sink", begun)

    class Slow(Widening):
        calls = 0

        def apply_to_many(self, events: pa.Table) -> Returned:
            self.calls += 1
            if self.calls == 2:  # before, nobody knows how much fits
                wait_for("tasks to read the third part", lambda: len(parts) >= 3, timeout_s=TIMEOUT_S)
            return self.apply(events)

    found = read_all(topic, spark, Slow())
    assert sum(batch.chunk.count for batch in found) == 2_000


def test_ids_of_fifty_years_in_one_batch_are_applied_or_set_aside(topic: Settings) -> None:
    publisher = Publisher(topic)
    old = publisher.events(3_000)
    spread = [replace(event, event_id=uuid7(RANDOM, NOW_MS - number * 6 * DAY_MS)) for number, event in enumerate(old)]
    publisher.send(spread)
    done = catch_up(topic.replace(sink_id_age_max_days=3663))
    assert done.returncode == 0, done.stderr[-2000:]
    reasons = Database(topic).query("SELECT reason, count(*) FROM dead_letters GROUP BY reason")
    assert reasons == [("id too old", 3_000 - 611)]
    assert Database(topic).applied() == 611


# Ranges of a topic that somebody else plans ---------------------------------------------------------------------------

WAIT_S = 30


@pytest.fixture
def follower(topic: Settings) -> Iterator[Follower]:
    made = Follower(topic, topic_of(topic))
    yield made
    made.close()


@pytest.fixture
def transactions(topic: Settings) -> Producer:
    """A producer that writes in transactions."""
    producer = Producer({**client_config(topic), "transactional.id": f"test-{uuid.uuid4()}"})
    producer.init_transactions(WAIT_S)
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
    producer.flush(WAIT_S)
    if commit:
        producer.commit_transaction(WAIT_S)
    else:
        producer.abort_transaction(WAIT_S)


def read(follower: Follower, start: Mapping[int, int], end: Mapping[int, int]) -> list[str]:
    return [(message.value() or b"").decode() for message in follower.read(start, end)]


@pytest.fixture
def traffic(topic: Settings) -> Iterator[threading.Thread]:
    """Somebody who writes to partition 1 all the time, until the test has ended or ``WAIT_S`` has passed."""
    ended = threading.Event()

    def write_on() -> None:
        producer, until = Producer(client_config(topic)), time.monotonic() + WAIT_S * timeout_scale()
        while not ended.is_set() and time.monotonic() < until:
            producer.produce(topic_of(topic), "foreign", partition=1)
            producer.flush(WAIT_S)

    thread = threading.Thread(target=write_on)
    thread.start()
    wait_for("the first record", lambda: end_of(topic)[1] > 0, timeout_s=WAIT_S)
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
        if chance.random() < 0.2:
            next(follower.read(at, to), None)  # it is left there, and begun anew
        found = [(one.partition() or 0, one.offset() or 0) for one in follower.read(at, to)]
        assert set(found) == {
            (partition, offset) for partition, offset in place if at[partition] <= offset < to[partition]
        }
        assert len(set(found)) == len(found)
        assert sorted(found, key=lambda place: place[0]) == sorted(found), "each partition in its order"
        at = to


def test_a_range_that_was_dropped_is_not_empty(topic: Settings, transactions: Producer, follower: Follower) -> None:
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
def test_a_silent_partition_is_reported_also_beside_records_of_another(
    topic: Settings, transactions: Producer, follower: Follower, traffic: threading.Thread
) -> None:
    with raises("topic-silent"):
        read(follower, {0: 0, 1: 0}, {0: 1, 1: 1})
    with raises("topic-silent"):
        list(records.read(topic, topic_of(topic), {0: (0, 1), 1: (0, 1)}))
    # As when a topic is created again after its offsets were looked up: the client begins at the earliest record.
    found: list[object] = []
    write(transactions, topic, "a", "b", "c", partition=2)
    with raises("topic-silent"):
        found += records.read(topic, topic_of(topic), {2: (500, 600)})
    assert found == []
    assert traffic.is_alive()


@pytest.mark.usefixtures("short_silence")
def test_what_is_held_for_later_is_bounded(topic: Settings, transactions: Producer, follower: Follower) -> None:
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


@pytest.mark.usefixtures("short_silence")
def test_a_range_may_end_with_an_aborted_record(topic: Settings, transactions: Producer, follower: Follower) -> None:
    """Another producer's transaction is open: what lies behind its first record is not to be read."""
    other = Producer({**client_config(topic), "transactional.id": f"test-{uuid.uuid4()}"})
    other.init_transactions(WAIT_S)
    write(transactions, topic, "a")  # offset 0, marker 1
    transactions.begin_transaction()
    transactions.produce(topic_of(topic), "never", partition=0)  # 2
    transactions.flush(WAIT_S)
    other.begin_transaction()
    other.produce(topic_of(topic), "b", partition=0)  # 3
    other.flush(WAIT_S)
    transactions.abort_transaction(WAIT_S)  # 4
    assert end_of(topic)[0] == 3

    def found(start: int, end: int) -> list[str]:
        by_range = [(one.value() or b"").decode() for one in records.read(topic, topic_of(topic), {0: (start, end)})]
        assert read(follower, {0: start}, {0: end}) == by_range
        return by_range

    assert found(0, 2) == ["a"]
    assert found(2, 3) == []
    other.commit_transaction(WAIT_S)  # 5
    assert found(3, 6) == ["b"]
