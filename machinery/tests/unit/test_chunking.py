"""Chunks: whatever shares records are read in, and whether the driver or a task reads them, the sink gets the same.
How a batch is divided among transactions and tasks, and what tasks and their processes are given.
"""

from __future__ import annotations

import json
import pickle
import struct
import sys
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from outbox.base.settings import SECRET_NAMES, Secret, load
from outbox.kafka.records import Part
from outbox.sink.decoding import dead_records
from outbox.sink.decoding.batch import Chunk
from outbox.sink.decoding.binary import Encoded
from outbox.sink.decoding.records import Record, Records
from outbox.sink.spark.daemon import without_archives
from outbox.sink.spark.reader import Read, ReadTask
from tests.support.made_events import MAIN, TOPIC, Event, as_read, nth_key, uuid7
from tests.support.record_corpus import HEADERS_OF, VALUES, record

RANDOM = Random(11)  # noqa: S311
PLAIN, FRAMED = MAIN.chunking(TOPIC), replace(MAIN.chunking(TOPIC), as_frame=True)
CORPUS = [*(record(value) for value, _ in VALUES.values()), *(record(headers=one) for one, _ in HEADERS_OF.values())]

Row = dict[str, bytes | None]


def good(number: int) -> Record:
    return Event(uuid7(RANDOM), nth_key(number % 5), 1 + number, version=number + 1).record


RECORDS = [good(number) if number % 2 else CORPUS[number // 2] for number in range(2 * len(CORPUS))]


def read(records: Sequence[Record], start: int = 0) -> Records:
    """Records as they are read from an offset on."""
    return replace(as_read(*records, partition=0), offsets=range(start, start + len(records)))


def rows_of(encoded: Sequence[Encoded]) -> Iterator[Row]:
    """The rows of a COPY, each by the names of its columns."""
    for columns, pieces in encoded:
        content, at = b"".join(pieces), 0
        while at < len(content):
            (count,) = struct.unpack_from(">h", content, at)
            assert count == len(columns)
            at += 2
            row = Row()
            for column in columns:
                (length,) = struct.unpack_from(">i", content, at)
                at += 4
                row[column] = None if length < 0 else content[at : at + length]
                at += max(length, 0)
            yield row


def rows_by_offset(encoded: Sequence[Encoded]) -> dict[bytes | None, Row]:
    return {row["offset"]: row for row in rows_of(encoded)}


@example({1, 2}, 1)  # each chunk has one record
@example(set[int](), 10**9)  # all are in one
@settings(max_examples=12)  # of a second each
@given(st.sets(st.integers(1, len(RECORDS) - 1), max_size=6), st.integers(1, 200_000))
def test_chunks_of_any_shares_come_to_the_same(cuts: set[int], max_bytes: int) -> None:
    """A task may end early, and another one goes on where it has ended."""
    chunks = {True: list[Chunk](), False: list[Chunk]()}
    for chunking, found in zip((FRAMED, PLAIN), (chunks[True], chunks[False]), strict=True):
        for start, end in zip([0, *sorted(cuts)], [*sorted(cuts), len(RECORDS)], strict=True):
            at = start
            while at < end:
                singly = (read([one], offset) for offset, one in enumerate(RECORDS[at:end], at))
                chunk, reached = chunking.first(singly, max_bytes)
                found.append(Read.of_chunk(chunk, reached).chunk)
                assert reached is None or at < reached[0] <= end
                at = end if reached is None else reached[0]
    whole, together = PLAIN.chunk(read(RECORDS)), Chunk.together(chunks[False])
    assert rows_by_offset(together.rows) == rows_by_offset(whole.rows)
    assert rows_by_offset(together.dead) == rows_by_offset(whole.dead)
    assert (together.count, together.dead_count) == (whole.count, whole.dead_count)
    assert together.count + together.dead_count == len(RECORDS)
    assert {*together.days} == {*whole.days}
    events, all_at_once = Chunk.together(chunks[True]).events, FRAMED.chunk(read(RECORDS)).events
    assert events is not None
    assert all_at_once is not None
    assert events.sort_by("offset").to_pylist() == all_at_once.sort_by("offset").to_pylist()
    ids = [bytes.fromhex(one.replace("-", "")) for one in events["event_id"].to_pylist()]
    assert Counter(row["event_id"] for row in rows_of(whole.rows)) == Counter(ids)


def test_a_chunk_ends_when_it_is_full_and_says_where() -> None:
    large = record(json.dumps({"note": "x" * 50_000}).encode())
    for chunking in (PLAIN, FRAMED):
        chunk, reached = chunking.first((read([large], offset) for offset in range(1_000)), max_bytes=1_000_000)
        assert reached is not None
        assert chunk.dead_count == reached[0] < 200


@pytest.mark.parametrize(
    "content", [b"\x01" * 1000, b"\x00", b"\xff", "ünicode \N{ROCKET}".encode() * 200, b'"' * 100, None, b""]
)
def test_headers_come_back_as_they_were_and_take_little_room(content: bytes | None) -> None:
    bad = record(b"bad")._replace(headers=[("h", content), ("h", b"twice")])
    [row] = rows_of(PLAIN.chunk(read([bad])).dead)
    stored = (row["headers"] or b"")[1:]  # behind the version of jsonb
    assert dead_records.headers(json.loads(stored)) == bad.headers
    assert len(stored) < 200 + 2 * len(content or b"")


def test_what_passes_through_spark_is_small() -> None:
    chunk = PLAIN.chunk(read([good(number) for number in range(5_000)]))
    assert len(pickle.dumps(Read.of_chunk(chunk, None))) < 0.7 * sum(one.size_bytes for one in chunk.rows)


RANGES = st.dictionaries(st.integers(0, 9), st.tuples(st.integers(0, 2**62), st.integers(0, 10**6)), max_size=5)


@given(RANGES, st.integers(1, 30))
@example(dict.fromkeys(range(150), (7, 1)), 2)  # half of what a transform fails for, with a record a partition
def test_parts_follow_each_other_and_are_of_one_size(ranges: dict[int, tuple[int, int]], count: int) -> None:
    start = {partition: first for partition, (first, _) in ranges.items()}
    end = {partition: first + more for partition, (first, more) in ranges.items()}
    parts = Part("t", start, end).divided(count)
    assert len(parts) == count
    assert (parts[0].start, parts[-1].end) == (start, end)
    assert all(one.end == following.start for one, following in pairwise(parts))
    assert all(end >= part.start[partition] for part in parts for partition, end in part.end.items())
    counts = [part.count for part in parts]
    assert max(counts) - min(counts) <= 1


@given(RANGES, st.integers(1, 10**6))
def test_no_part_has_more_than_its_maximum(ranges: dict[int, tuple[int, int]], most: int) -> None:
    part = Part("t", {n: first for n, (first, _) in ranges.items()}, {n: sum(both) for n, both in ranges.items()})
    most = max(most, part.count // 1000)  # few enough parts for a test
    parts = part.in_parts(max(most, 1))
    assert all(0 < one.count <= most for one in parts)
    assert sum(one.count for one in parts) == part.count


def test_a_task_knows_the_passwords_that_it_needs_alone(tmp_path: Path) -> None:
    known = load(tmp_path, environment=False).replace(**{one: Secret(f"secret of {one}") for one in SECRET_NAMES})
    sent = pickle.dumps(ReadTask.of_sink(known, PLAIN, TOPIC, max_bytes=1))
    assert {name for name in SECRET_NAMES if f"secret of {name}".encode() in sent} == {"kafka_password"}


def test_tasks_read_no_archive_but_one_that_alone_has_pyspark(tmp_path: Path) -> None:
    found = without_archives(["/spark/pyspark.zip", *sys.path, "/spark/spark-core.jar"])
    assert found == [entry for entry in sys.path if not entry.endswith(".zip")]
    with zipfile.ZipFile(tmp_path / "pyspark.zip", "w") as archive:
        archive.writestr("pyspark/__init__.py", "")
    path = [str(tmp_path), str(tmp_path / "pyspark.zip")]
    assert without_archives(path) == path
