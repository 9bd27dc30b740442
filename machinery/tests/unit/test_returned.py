"""Rows that a transform has returned, joined with the events that it was given."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pyarrow as pa
import pytest

from outbox.events.schema import Column
from outbox.sink.applying.postgres.applier import Known
from outbox.sink.applying.postgres.transforming import join
from outbox.sink.decoding.batch import Returned
from outbox.sink.decoding.layout import FAILURE, IS_FILTERED, KEY, TYPE, VERSION
from outbox_lab.testing.failures import raises

PLACES = [("a", 0, 0), ("b", 0, 1), ("c", 1, 0)]
KNOWN = Known("order.placed", "id", "number")
COLUMNS = [Column("total", "bigint", is_nullable=True)]
EVENTS = pa.table(
    {
        "event_id": [event_id for event_id, _, _ in PLACES],
        "partition": pa.array([partition for _, partition, _ in PLACES], pa.int32()),
        "offset": pa.array([offset for _, _, offset in PLACES], pa.int64()),
        "id": ["x", "y", "z"],
        "number": pa.array([1, 2, 3], pa.int64()),
    }
)


def returned(*rows: tuple[Any, Any, Any, int], failed: dict[tuple[int, int], str] | None = None) -> Returned:
    ids, partitions, offsets, totals = zip(*rows, strict=True) if rows else ((), (), (), ())
    table = pa.table(
        {
            "event_id": pa.array(ids, pa.string()),
            "partition": pa.array(partitions, pa.int32()),
            "offset": pa.array(offsets, pa.int64()),
            "total": pa.array(totals, pa.int64()),
        }
    )
    return Returned(table, failed or {})


def test_each_event_has_a_row_in_its_order_whatever_was_returned() -> None:
    found = join("s", EVENTS, returned(("c", 1, 0, 30), ("a", 0, 0, 10), failed={(0, 1): "it fails"}), COLUMNS, KNOWN)
    assert found["event_id"].to_pylist() == ["a", "b", "c"]
    assert found["total"].to_pylist() == [10, None, 30]
    assert found[IS_FILTERED].to_pylist() == [False, False, False]
    assert found[FAILURE].to_pylist() == [None, "it fails", None]
    assert (found[TYPE].to_pylist(), found[KEY].to_pylist()) == (["order.placed"] * 3, ["x", "y", "z"])
    assert found[VERSION].to_pylist() == [1, 2, 3]


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_the_order_of_what_was_returned_means_nothing(order: tuple[int, ...]) -> None:
    rows = [(*PLACES[number], 10 * number) for number in order]
    found = join("s", EVENTS, returned(*rows), COLUMNS, KNOWN)
    assert (found["event_id"].to_pylist(), found["total"].to_pylist()) == (["a", "b", "c"], [0, 10, 20])
    assert found[IS_FILTERED].to_pylist() == [False] * 3


def test_an_event_without_a_row_is_filtered() -> None:
    assert join("s", EVENTS, returned(), COLUMNS, KNOWN)[IS_FILTERED].to_pylist() == [True] * 3


@pytest.mark.parametrize(
    "rows",
    [
        [("a", 0, 0, 1), ("a", 0, 0, 1)],
        [("a", 0, 0, 1), ("a", 0, 7, 1)],
        [("A", 0, 0, 1)],
        [(None, 0, 0, 1), ("a", 0, 0, 1)],
        [("a", None, 0, 1), ("b", None, 1, 1)],
        [("b", 0, 0, 1)],
    ],
    ids=["twice", "another offset", "another case", "no id", "no partition", "another event's place"],
)
def test_a_row_of_no_event_and_a_second_one_are_named(rows: list[tuple[Any, Any, Any, int]]) -> None:
    with raises("transform-breaks-rule", "event "):
        join("s", EVENTS, returned(*rows), COLUMNS, KNOWN)
