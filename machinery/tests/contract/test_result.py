"""What is compared, and what strategies promise."""

from __future__ import annotations

from contextlib import closing

import pytest

from outbox.base.database import connect
from outbox.base.settings import Settings, SinkRole
from outbox.sink.strategy import BUILT_IN, find
from outbox.testing.contract import ways
from outbox.testing.contract.result import Difference, Place, Reader, difference
from tests.support.deliveries import PROMISES
from tests.support.made_events import STRATEGIES


def test_the_tables_of_the_project_are_compared_and_no_others(databases: Settings) -> None:
    with closing(connect(databases, SinkRole.OWNER)) as owner:
        tables = {table.name: table for table in Reader(owner, find("dedup")).tables}
        assert {*tables} == {"activity", "orders", "stock"}
    assert "updated_at" not in tables["stock"].columns
    assert tables["activity"].key == ["aggregate", "key"]


@pytest.mark.parametrize("name", PROMISES)
def test_the_header_of_a_strategy_says_what_it_survives(name: str) -> None:
    repeats = {(True, True): "all", (True, False): "re-reads", (False, False): "none"}
    promise = PROMISES[name]
    assert STRATEGIES[name].repeats == repeats[promise.re_reads, promise.re_sends]


def test_ways_that_a_strategy_does_not_promise_are_left_out() -> None:
    left_out = {name: len(ways.WAYS) - len(ways.of(STRATEGIES[name])) for name in PROMISES}
    assert left_out == {
        "dedup": 0, "merge": 0, "versions": 0, "upsert": 1, "offsets": 2, "naive": 4,
    }  # fmt: skip
    assert {file.stem for file in BUILT_IN.glob("*.sql")} <= {*left_out}


def test_a_difference_names_the_row_and_both_values() -> None:
    place = Place("stock", "item_id 1")
    row = {"unit": "KGM", "stock": 1}
    assert difference({place: row}, {place: dict(row)}) is None
    assert difference({place: row}, {}) == Difference(place, row, None)
    changed = difference({place: row}, {place: row | {"stock": 2}})
    assert str(changed) == "table stock, row item_id 1: stock is 1 in the reference and 2 here"
