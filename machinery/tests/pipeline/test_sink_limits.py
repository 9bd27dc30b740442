"""Bounds of a sink: memory whatever the records are, and the harm that one sink's failure does to its neighbours."""

from __future__ import annotations

import json
import multiprocessing
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

from outbox.base.settings import Settings
from outbox.base.wait import wait_for
from outbox.kafka import topics
from outbox.kafka.clients import client_config
from outbox.kafka.records import Part
from outbox.sink import discovery
from outbox.sink.decoding.batch import Batch, Chunking, Returned
from outbox.sink.spark import reader
from tests.support.made_events import DAY_MS, MAIN, NOW_MS, TOPIC, uuid7
from tests.support.sink_driver import Database
from tests.support.sink_process import Publisher, catch_up, catch_up_alone, logged
from tests.support.topic_reader import topic_of

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


@pytest.mark.parametrize("partition", [0, -1], ids=["one partition", "all"])
def test_a_batch_of_garbage_larger_than_the_heap_is_set_aside(topic: Settings, partition: int) -> None:
    produce(topic, INVALID_RECORDS, json.dumps({"note": "x" * INVALID_BYTES}).encode(), at=partition)
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


@pytest.mark.parametrize(
    ("value", "headers"), [(b"x" * LARGE_BYTES, {}), (b"x", {"large": b"x" * LARGE_BYTES})], ids=["value", "header"]
)
def test_a_task_holds_few_of_the_largest_records_at_once(
    topic: Settings, value: bytes, headers: dict[str, bytes]
) -> None:
    produce(topic, LARGE_RECORDS, value, headers)
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


def test_what_the_driver_reads_itself_is_bounded_too(
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


def test_what_a_transform_returns_counts_too(
    topic: Settings, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
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
