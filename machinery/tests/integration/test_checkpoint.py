"""Which checkpoints a query can continue, and where the next batch begins as far as the files say."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from outbox.sink.remembering.positions import TopicOffsets
from outbox.sink.running.checkpoint import Checkpoint
from outbox_lab.testing.fixtures.spark import leaves_sockets

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


def checkpoint(spark: SparkSession, folder: Path) -> Checkpoint:
    return Checkpoint(spark, folder.as_uri())


def at(offset: int) -> dict[str, dict[int, int]]:
    return {TOPIC: {0: offset}}


def problem(found: Checkpoint, positions: TopicOffsets) -> str | None:
    return found.problem(found.start(), positions)


def test_a_folder_without_files_is_new(spark: SparkSession, tmp_path: Path) -> None:
    found = checkpoint(spark, tmp_path / "missing")
    assert found.is_new()
    assert (found.start(), problem(found, at(0))) == (None, None)


def test_before_the_first_batch_it_begins_where_the_query_was_told(spark: SparkSession, folder: Path) -> None:
    found = checkpoint(spark, folder)
    assert not found.is_new()
    assert (found.start(), problem(found, at(5)), found.is_pending()) == (at(5), None, False)
    (folder / "sources/0/0").unlink()
    assert (found.start(), problem(found, at(5))) == (None, None), "killed before Spark had written it"


def test_uncommitted_batch_begins_where_the_last_one_ended(spark: SparkSession, folder: Path) -> None:
    plan(folder, 0)
    found = checkpoint(spark, folder)
    assert (found.start(), found.end(0), problem(found, at(10)), found.is_pending()) == (at(5), at(10), None, True)
    commit(folder, 0)
    assert (found.start(), problem(found, at(10)), found.is_pending()) == (at(10), None, False)
    plan(folder, 1)
    assert (found.start(), found.end(1), problem(found, at(10)), found.is_pending()) == (at(10), at(20), None, True)


def test_one_that_is_behind_the_positions_is_continued(spark: SparkSession, folder: Path) -> None:
    plan(folder, 0)
    commit(folder, 0)
    assert problem(checkpoint(spark, folder), {TOPIC: {0: 99, 1: 3}}) is None


@pytest.mark.parametrize("positions", [{0: 9}, {}, {1: 99}])
def test_one_that_is_ahead_of_the_positions_is_not(
    spark: SparkSession, folder: Path, positions: dict[int, int]
) -> None:
    plan(folder, 0)
    commit(folder, 0)
    assert "ahead" in (problem(checkpoint(spark, folder), {TOPIC: positions}) or "")


@pytest.mark.parametrize("topics", [{"other"}, {TOPIC, "other"}])
def test_one_of_other_topics_is_not(spark: SparkSession, folder: Path, topics: set[str]) -> None:
    plan(folder, 0)
    commit(folder, 0)
    assert "other topics: events" in (problem(checkpoint(spark, folder), {topic: {0: 99} for topic in topics}) or "")


@pytest.mark.parametrize("content", ["", "\0v1", "\0v1\n", '\0v1\n{"events":{"0":', "\0" * 20])
def test_the_beginning_is_needed_until_the_first_commit(spark: SparkSession, folder: Path, content: str) -> None:
    plan(folder, 0)
    (folder / "sources/0/0").write_text(content)
    found = checkpoint(spark, folder)
    assert problem(found, at(99)) == "truncated or missing: sources/0/0"
    assert found.start() is None
    commit(folder, 0)
    plan(folder, 1)
    assert (found.start(), problem(found, at(99))) == (at(10), None)


@pytest.mark.parametrize(
    ("file", "kept"),
    [*((file, -1) for file in ("metadata", "offsets/1", "commits/1", "offsets/2")), ("offsets/1", len("v1"))],
)
def test_one_with_a_truncated_file_is_not_continued(spark: SparkSession, folder: Path, file: str, kept: int) -> None:
    plan(folder, 0, 1, 2)
    commit(folder, 0, 1)
    found = checkpoint(spark, folder)
    assert problem(found, at(20)) is None
    (folder / file).write_text((folder / file).read_text()[:kept])
    assert problem(found, at(20)) == f"truncated or missing: {file}"
    assert found.start() == (at(10) if file == "offsets/1" else at(20)), "the newest that is known"
    if file != "offsets/2":  # without it, the batch is planned again
        (folder / file).unlink()
        assert problem(found, at(20)) == f"truncated or missing: {file}"


def test_one_that_has_lost_its_commits_or_its_plans_is_not_continued(spark: SparkSession, folder: Path) -> None:
    plan(folder, 0, 1, 2)
    commit(folder, 0)
    found = checkpoint(spark, folder)
    assert problem(found, at(99)) == "truncated or missing: commits/1"
    commit(folder, 1, 2, 3)
    assert problem(found, at(99)) == "truncated or missing: offsets/3"
