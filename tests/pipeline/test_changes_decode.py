"""What the sink `changes` lets pass in Spark, on the corpus whose faults `unit/test_changes_judge.py` has told."""

from __future__ import annotations

from pyspark.sql import DataFrame, SparkSession

from sinks.changes.events import changes
from tests.changes import CASES, DELETED, TYPES, UPDATED, Change
from tests.fix_spark import RECORD, RECORDED_AT, leaves_sockets
from tests.sink import account

pytestmark = leaves_sockets


def records(spark: SparkSession, *pairs: tuple[bytes | None, bytes | None]) -> DataFrame:
    cells = [(key, value, "t", 0, offset, RECORDED_AT, None) for offset, (key, value) in enumerate(pairs)]
    return spark.createDataFrame(cells, RECORD)


def test_records_pass_if_nothing_is_wrong_with_them(spark: SparkSession) -> None:
    rows = changes(records(spark, *(record for record, _ in CASES.values()))).collect()
    found = {name: row["record"] is None for name, row in zip(CASES, rows, strict=True)}
    assert found == {name: reason is None for name, (_, reason) in CASES.items()}


def test_they_carry_the_staged_columns_and_an_id_of_what_tells_them_apart(spark: SparkSession) -> None:
    changed, gone = changes(records(spark, UPDATED.record(), DELETED.record())).collect()
    assert set(changed.asDict()) == {*TYPES, "record"}
    for row, change in ((changed, UPDATED), (gone, DELETED)):
        assert {name: row[name] for name in TYPES if name not in ("partition", "offset")} == {
            name: getattr(change, name) for name in TYPES if name not in ("partition", "offset")
        }


def test_the_id_is_the_same_for_the_same_change_alone(spark: SparkSession) -> None:
    others = [
        Change(account(7), "u", 4096, 0, 0),
        Change(account(7), "u", 4096, 1, 1),  # the same: what the row was does not count
        Change(account(8), "u", 4096, 0, 0),
        Change(account(7), "u", 4097, 0, 0),
        Change(account(7), "r", 4096, 0, 0),
    ]
    ids = [row["event_id"] for row in changes(records(spark, *(one.record() for one in others))).collect()]
    assert ids[0] == ids[1]
    assert len(set(ids)) == 4


def test_a_record_that_is_not_valid_has_an_id_if_it_tells_one(spark: SparkSession) -> None:
    """By which its letter is known, and can be replayed."""
    wrong = [UPDATED.record(version=None), CASES["no lsn"][0], CASES["no JSON"][0]]
    rows = changes(records(spark, *wrong)).collect()
    assert [row["event_id"] for row in rows] == [UPDATED.event_id, None, None]
    assert all(row["record"] is not None for row in rows)
