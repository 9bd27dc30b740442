"""How a batch is divided among transactions and tasks, and what tasks and their processes are given."""

from __future__ import annotations

import pickle
import sys
import zipfile
from itertools import pairwise
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from outbox.base.settings import SECRET_NAMES, Secret, load
from outbox.kafka.records import Part
from outbox.sink.spark.daemon import without_archives
from outbox.sink.spark.reader import ReadTask
from tests.support.made_events import MAIN, TOPIC

RANGES = st.dictionaries(st.integers(0, 9), st.tuples(st.integers(0, 2**62), st.integers(0, 10**6)), max_size=5)


@given(RANGES, st.integers(1, 30))
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


def test_half_of_a_part_with_one_record_a_partition_has_half_of_the_records() -> None:
    # A transform that fails for a record is given half of its part, again and again until it has few records.
    part = Part("t", dict.fromkeys(range(150), 7), dict.fromkeys(range(150), 8))
    assert [half.count for half in part.divided(2)] == [75, 75]


@given(RANGES, st.integers(1, 10**6))
def test_no_part_has_more_than_its_maximum(ranges: dict[int, tuple[int, int]], most: int) -> None:
    part = Part("t", {n: first for n, (first, _) in ranges.items()}, {n: sum(both) for n, both in ranges.items()})
    most = max(most, part.count // 1000)  # few enough parts for a test
    parts = part.in_parts(max(most, 1))
    assert all(0 < one.count <= most for one in parts)
    assert sum(one.count for one in parts) == part.count


def test_a_task_knows_the_passwords_that_it_needs_alone(tmp_path: Path) -> None:
    settings = load(tmp_path, environment=False)
    known = settings.replace(**{name: Secret(f"secret of {name}") for name in SECRET_NAMES})
    task = ReadTask.of_sink(known, MAIN.chunking(TOPIC), TOPIC, max_bytes=1)
    sent = pickle.dumps(task)
    told = {name for name in SECRET_NAMES if f"secret of {name}".encode() in sent}
    assert told == {"kafka_password"}


def test_tasks_read_no_archive() -> None:
    found = without_archives(["/spark/pyspark.zip", *sys.path, "/spark/spark-core.jar"])
    assert found == [entry for entry in sys.path if not entry.endswith(".zip")]


def test_pyspark_that_is_in_an_archive_only_stays_there(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "pyspark.zip", "w") as archive:
        archive.writestr("pyspark/__init__.py", "")
    path = [str(tmp_path), str(tmp_path / "pyspark.zip")]
    assert without_archives(path) == path
