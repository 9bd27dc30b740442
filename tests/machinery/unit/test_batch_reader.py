"""How a batch is divided among transactions and tasks, and what tasks are given and hold."""

from __future__ import annotations

import pickle
from itertools import pairwise
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Message
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from outbox.base.settings import load
from outbox.kafka.records import BATCH_RECORDS, STEP_RECORDS, _consume
from outbox.sink.postgres.staging import Staging
from outbox.sink.spark.reader import Part, StagingTask, divided
from tests.support.events import DECODER

RANGES = st.dictionaries(st.integers(0, 9), st.tuples(st.integers(0, 2**62), st.integers(0, 10**6)), max_size=5)


def length(part: Part) -> int:
    start, end = part
    return sum(end[partition] - start[partition] for partition in end)


@given(RANGES, st.integers(1, 30))
def test_parts_follow_each_other_and_are_of_one_size(ranges: dict[int, tuple[int, int]], count: int) -> None:
    start = {partition: first for partition, (first, _) in ranges.items()}
    end = {partition: first + more for partition, (first, more) in ranges.items()}
    parts = divided((start, end), count)
    assert len(parts) == count
    assert (parts[0][0], parts[-1][1]) == (start, end)
    assert all(one[1] == following[0] for one, following in pairwise(parts))
    lengths = [length(part) for part in parts]
    assert max(lengths) - min(lengths) <= len(ranges)


def test_a_task_knows_the_passwords_that_it_needs_alone(tmp_path: Path) -> None:
    settings = load(tmp_path, environment=False)
    names = [name for name, value in settings if isinstance(value, SecretStr)]
    known = settings.model_copy(update={name: SecretStr(f"secret of {name}") for name in names})
    task = StagingTask.of(known, known.topic, Staging("dedup", 1, DECODER, with_days=True))
    sent = pickle.dumps(task)
    told = {name for name in names if f"secret of {name}".encode() in sent}
    assert told == {"kafka_password", "sink_db_writer_password"}


class Endless(Consumer):
    """A consumer that always has as many records as it is asked for, all of one size."""

    def __init__(self, size: int) -> None:
        super().__init__({"group.id": "none"})
        self._message = Message(value=bytes(size))

    def consume(self, num_messages: int = 1, timeout: float = -1) -> list[Message]:  # noqa: ARG002
        return [self._message] * num_messages


@pytest.mark.parametrize(("size", "expected"), [(100, BATCH_RECORDS), (100_000, STEP_RECORDS), (1 << 20, STEP_RECORDS)])
def test_large_records_are_held_in_small_numbers(size: int, expected: int) -> None:
    assert len(_consume(Endless(size))) == expected
