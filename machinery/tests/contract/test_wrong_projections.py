"""Projections that break the contract, each caught by the way of delivery that shows it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from pathlib import Path

import pytest

from outbox.base.database import connect
from outbox.base.settings import Settings, SinkRole
from outbox.sink import discovery
from outbox_lab.testing.contract.contract import keep

FreshDatabases = Callable[[], AbstractContextManager[Settings]]

WRONG = Path(__file__).with_name("wrong")
SEED = 24
# What the fixture domain does not have.
TABLES = """
CREATE TABLE shared (sink text NOT NULL, item_id uuid PRIMARY KEY, events bigint NOT NULL);
CREATE SEQUENCE numbers;
GRANT SELECT, INSERT, UPDATE ON shared TO {writer};
GRANT USAGE ON SEQUENCE numbers TO {writer};
"""
IN_BATCHES = "one event per batch|in other batches"
EXPECTED = {
    "reads_batch": ("each event twice in a batch", "activity"),
    "now": ("the same again", "activity"),
    "random": ("the same again", "activity"),
    "key_without_sink": ("beside another sink of the job", "shared"),
    "last_of_batch": (IN_BATCHES, "stock"),
    "offset": ("at other offsets", "activity"),
    "first_of_key": (IN_BATCHES, "stock"),
    "sequence": (f"{IN_BATCHES}|with the keys interleaved otherwise|beside another sink of the job", "activity"),
    "reads_others": ("beside another sink of the job", "activity"),
    "replaces_newer": ("some as dead letters, then replayed", "stock"),
}


def problem(fresh: FreshDatabases, folder: Path, name: str, shrinking_max: int = 0, strategy: str = "dedup") -> str:
    """How a sink with this projection breaks the contract."""
    projections = folder / "wrong"
    projections.mkdir()
    shutil.copy(WRONG / f"{name}.sql", projections / f"{name}.sql")
    with fresh() as settings:
        with closing(connect(settings, SinkRole.OWNER)) as owner, owner, owner.cursor() as cursor:
            cursor.execute(TABLES.format(writer=settings.role_name(SinkRole.WRITER)))
        job = replace(discovery.sinks(settings)[strategy].job, projections=projections)
        with pytest.raises(AssertionError) as caught:
            keep(settings, discovery.resolve(settings, job), seed=SEED, shrinking_max=shrinking_max)
    return str(caught.value)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_wrong_projection_is_named(fresh_databases: FreshDatabases, tmp_path: Path, name: str) -> None:
    way, table = EXPECTED[name]
    found = problem(fresh_databases, tmp_path, name)
    assert re.match(rf"sink dedup, ({way}): table {table}, row .* in the reference", found), found
    assert f"--hypothesis-seed={SEED}" in found


def test_a_row_without_the_column_sink_is_named(fresh_databases: FreshDatabases, tmp_path: Path) -> None:
    found = problem(fresh_databases, tmp_path, "without_sink")
    assert found.startswith("sink dedup: ")
    assert 'null value in column "sink" of relation "activity"' in found


def test_a_sink_that_stops_at_two_events_of_a_key_is_named(fresh_databases: FreshDatabases, tmp_path: Path) -> None:
    found = problem(fresh_databases, tmp_path, "several_rows")
    assert found.startswith("sink dedup stops at valid events")
    assert "cannot affect row a second time" in found


def test_a_failing_history_is_shrunk(fresh_databases: FreshDatabases, tmp_path: Path) -> None:
    found = problem(fresh_databases, tmp_path, "first_of_key", shrinking_max=200)
    assert len(re.findall(r"^  \d+\. item\.", found, re.MULTILINE)) == 2, found


def test_every_wrong_projection_is_tried() -> None:
    assert {file.stem for file in WRONG.glob("*.sql")} == {*EXPECTED, "without_sink", "several_rows"}
