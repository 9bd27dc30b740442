"""A checkpoint whose files a crash of the host has truncated: what is deleted, and what is reported instead."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from outbox.sink.spark import local_checkpoint
from outbox.sink.spark.checkpoint import Checkpoint
from outbox.testing.failures import raises
from outbox.testing.fixtures.spark import leaves_sockets

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = leaves_sockets

TOPIC = "events"
BATCH_METADATA = '{"batchWatermarkMs":0,"batchTimestampMs":1,"conf":{}}'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint that Spark has just made."""
    for name in ("offsets", "commits", "sources/0"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "metadata").write_text('{"id":"f65c8f5c-5b0f-4c2e-9f43-2e0ad3f5b7a1"}')
    (tmp_path / "sources/0/0").write_text('\0v1\n{"events":{"0":5}}')
    return tmp_path


def plan(folder: Path, *batches: int) -> None:
    for batch in batches:
        (folder / f"offsets/{batch}").write_text(f'v1\n{BATCH_METADATA}\n{{"events":{{"0":{(batch + 1) * 10}}}}}')


def commit(folder: Path, *batches: int) -> None:
    for batch in batches:
        (folder / f"commits/{batch}").write_text('v1\n{"nextBatchWatermarkMs":0}')


def truncate(folder: Path, *files: str) -> None:
    """Cut off the last character of these files."""
    for file in files:
        (folder / file).write_text((folder / file).read_text()[:-1])


def checkpoint(spark: SparkSession, folder: Path) -> Checkpoint:
    return Checkpoint(spark, folder.as_uri(), "dedup")


def test_complete_files_are_kept(spark: SparkSession, folder: Path) -> None:
    plan(folder, 0, 1)
    commit(folder, 0)
    found = checkpoint(spark, folder)
    assert found.repair() == []
    first, second = {TOPIC: {0: 5}}, {TOPIC: {0: 10}}
    assert (found.start(0), found.end(0), found.start(1), found.applied()) == (first, second, second, second)
    assert found.topics() == {TOPIC}


def test_an_offsets_file_without_its_last_line_is_deleted(spark: SparkSession, folder: Path) -> None:
    plan(folder, 0, 1, 2)
    commit(folder, 0, 1)
    (folder / "offsets/2").write_text(f"v1\n{BATCH_METADATA}")
    found = checkpoint(spark, folder)
    assert found.repair() == ["offsets/2"]
    assert found.applied() == {TOPIC: {0: 20}}
    assert found.repair() == []


def test_a_commit_without_its_planned_batch_is_deleted(spark: SparkSession, folder: Path) -> None:
    plan(folder, 0, 1)
    commit(folder, 0, 1)
    truncate(folder, "offsets/1")
    assert local_checkpoint.committed(folder) == {TOPIC: {0: 10}}
    found = checkpoint(spark, folder)
    assert found.repair() == ["offsets/1", "commits/1"]
    assert found.applied() == {TOPIC: {0: 10}}


@pytest.mark.parametrize("content", ["", "\0v1", "\0v1\n", '\0v1\n{"events":{"0":', "\0" * 20])
def test_before_the_first_commit_a_broken_beginning_is_deleted_with_its_batch(
    spark: SparkSession, folder: Path, content: str
) -> None:
    plan(folder, 0)
    (folder / "sources/0/0").write_text(content)
    found = checkpoint(spark, folder)
    assert found.repair() == ["sources/0/0", "offsets/0"]
    assert not found.exists(), "the query did not start afresh"


def test_before_the_first_commit_all_files_may_be_truncated(spark: SparkSession, folder: Path) -> None:
    plan(folder, 0)
    commit(folder, 0)
    files = ["commits/0", "metadata", "offsets/0", "sources/0/0"]
    truncate(folder, *files)
    found = checkpoint(spark, folder)
    assert sorted(found.repair()) == files
    assert not found.exists()


def test_after_the_first_commit_the_beginning_is_not_needed(spark: SparkSession, folder: Path) -> None:
    plan(folder, 0, 1)
    commit(folder, 0)
    truncate(folder, "sources/0/0")
    found = checkpoint(spark, folder)
    assert found.repair() == []
    assert found.start(1) == {TOPIC: {0: 10}}


@pytest.mark.parametrize("file", ["metadata", "offsets/1"])
def test_another_file_that_is_truncated_is_reported_with_a_remedy(spark: SparkSession, folder: Path, file: str) -> None:
    plan(folder, 0, 1, 2)
    commit(folder, 0, 1)
    truncate(folder, file)
    with raises("checkpoint-broken", folder.as_uri(), f": {file} ", "`outbox rewind dedup --to-positions`"):
        checkpoint(spark, folder).repair()
    assert (folder / file).exists()


def test_a_missing_offsets_file_is_reported(spark: SparkSession, folder: Path) -> None:
    plan(folder, 1, 2)
    commit(folder, 1)
    (folder / "offsets/1").unlink()
    with raises("checkpoint-broken", ": offsets/1 "):
        checkpoint(spark, folder).repair()
