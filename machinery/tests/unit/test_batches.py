"""Batches of a sink. Whatever shares records are read in, and whether the driver or a task reads them, the sink gets
the same. How a batch is divided among transactions and tasks, and what tasks and their processes are given.
"""

from __future__ import annotations

import pickle
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, permutations
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from outbox.base.settings import SECRET_NAMES, Secret, load
from outbox.events.schema import Column, SqlType
from outbox.kafka.records import Part
from outbox.sink.applying.postgres.applier import Known
from outbox.sink.applying.postgres.transforming import join, storable
from outbox.sink.decoding.batch import Chunk, Returned
from outbox.sink.decoding.binary import Encoded
from outbox.sink.decoding.layout import FAILURE, IS_FILTERED, KEY, TYPE, VERSION, Layout
from outbox.sink.decoding.records import Record, Records
from outbox.sink.decoding.values import Columns
from outbox.sink.spark.reader import Read, ReadTask
from outbox_lab.testing.failures import raises
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


def test_a_task_knows_the_passwords_that_it_needs_alone(tmp_path: Path) -> None:
    known = load(tmp_path, environment=False).replace(**{one: Secret(f"secret of {one}") for one in SECRET_NAMES})
    sent = pickle.dumps(ReadTask.of_sink(known, PLAIN, TOPIC, max_bytes=1))
    assert {name for name in SECRET_NAMES if f"secret of {name}".encode() in sent} == {"kafka_password"}


# How the events of a sink lie in its tables ---------------------------------------------------------------------------


ID, PRICE = Column("id", "text", is_nullable=False), Column("price", "bigint", is_nullable=False)
NOTE = Column("note", "text", is_nullable=True)
EXACT = Column("price", "numeric", is_nullable=False)


def test_several_events_share_columns_of_one_name_and_type() -> None:
    events = {"a.x": [ID, PRICE], "a.y": [ID._replace(is_nullable=True), EXACT, NOTE], "b.z": [ID, EXACT]}
    for chosen in (events, dict(reversed(events.items()))):
        layout = Layout(chosen)
        assert {(column.name, column.type, column.is_nullable) for column in layout.columns} == {
            ("event_type", "text", False),
            ("id", "text", True),
            ("price:bigint", "bigint", True),
            ("price:numeric", "numeric", True),
            ("note", "text", True),
        }
    assert not Layout({"a.x": [ID], "a.y": [ID]}).columns[1].is_nullable


def test_columns_of_all_events_fit_into_one_table() -> None:
    def wide(count: int, prefix: str) -> Sequence[Column]:
        return [Column(f"{prefix}{number}", "boolean", is_nullable=True) for number in range(count)]

    assert len(Layout({"a.x": wide(800, "p"), "a.y": wide(699, "q")}).columns) == 1500
    with raises("sink-unusable", "a.x, a.y have 1501 columns"):
        Layout({"a.x": wide(801, "p"), "a.y": wide(699, "q")})


def test_one_table_has_null_where_an_event_lacks_a_column() -> None:
    def rows(**columns: object) -> Columns:
        return {name: [value] for name, value in {"event_id": "0", "partition": 0, "offset": 0, **columns}.items()}

    layout = Layout({"a.x": [ID, PRICE], "a.y": [ID, EXACT, NOTE]})
    found = layout.table({"a.x": rows(id="k", price=7), "a.y": rows(id="l", price="1.5", note=None)})
    assert [tuple(row.values())[3:] for row in found.to_pylist()] == [
        ("a.x", "k", 7, None, None),
        ("a.y", "l", None, "1.5", None),
    ]


@pytest.mark.parametrize("names", [("a.b_c", "a.b-c"), ("a.b_c", "a.B_C"), ("a.b_c", "a-b.c"), (f"a.{'x' * 58}",)])
def test_views_of_one_name_or_with_one_that_postgres_would_cut_off_are_refused(names: tuple[str, ...]) -> None:
    with raises("sink-unusable", *names):
        Layout({name: [ID] for name in names})


class TestReturned:
    """Rows that a transform has returned."""

    @pytest.mark.parametrize(
        ("type_", "value"),
        [
            ("text", pa.array(["a\0"])),
            ("text", pa.array([b"\xff"]).view(pa.string())),
            *(("uuid", pa.array([text])) for text in ("", "0" * 32)),
            *(("jsonb", pa.array([text])) for text in (r'["a\u0000"]', "[1")),
            *(("numeric", pa.array([text])) for text in ("abc", "NaN", "1" * 4301)),
            ("timestamptz", pa.array([300_000 * 10**12], pa.timestamp("us", tz="UTC"))),
        ],
    )
    def test_a_value_that_postgres_would_refuse_is_named(self, type_: SqlType, value: pa.Array) -> None:
        place = {"event_id": ["a"], "partition": pa.array([0], pa.int32()), "offset": pa.array([0], pa.int64())}
        with pytest.raises(ValueError, match="column it: "):
            storable(pa.table({**place, "it": value}), [Column("it", type_, is_nullable=True)])
