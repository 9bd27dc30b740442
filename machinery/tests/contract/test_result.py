"""Rows that are compared, and the promises of strategies."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from random import Random

import pytest

from outbox.base.database import connect
from outbox.base.settings import Settings, SinkRole
from outbox.sink.remembering.strategy import BUILT_IN, find
from outbox_lab.testing.contract.contract import WAYS, survived_by
from outbox_lab.testing.contract.delivery import Database, Delivery, Difference, Reader, RowPlace, difference, placed
from outbox_lab.testing.contract.events import Sent
from tests.support import declared_sinks
from tests.support.declared import Events, payload
from tests.support.deliveries import PROMISES
from tests.support.made_events import SPECS, STRATEGIES, uuid7


def test_the_tables_of_the_project_are_compared_and_no_others(databases: Settings) -> None:
    with closing(connect(databases, SinkRole.OWNER)) as owner:
        tables = {table.name: table for table in Reader(owner, find("dedup")).tables}
        assert {*tables} == {"activity", "handled_events", "orders", "stock"}
    assert "updated_at" not in tables["stock"].columns
    assert tables["activity"].key == ["aggregate", "key"]


@pytest.mark.parametrize("name", PROMISES)
def test_the_header_of_a_strategy_says_what_it_survives(name: str) -> None:
    repeats = {(True, True): "all", (True, False): "re-reads", (False, False): "none"}
    promise = PROMISES[name]
    assert STRATEGIES[name].repeats == repeats[promise.re_reads, promise.re_sends]


def test_ways_that_a_strategy_does_not_promise_are_left_out() -> None:
    all_ways = [way for way in WAYS if not way.is_of_function]
    left_out = {name: len(all_ways) - len(survived_by(SPECS[name])) for name in PROMISES}
    assert left_out == {
        "dedup": 0, "merge": 0, "versions": 0, "upsert": 1, "offsets": 2, "naive": 4,
    }  # fmt: skip
    assert {file.stem for file in BUILT_IN.glob("*.sql")} <= {*left_out}


def test_an_event_that_is_not_asked_for_is_not_set_aside(databases: Settings, tmp_path: Path) -> None:
    of_order = payload({})
    toml = 'key = "id"\nversion = "number"\n'
    known = Events(tmp_path / "events").aggregate("order", toml, placed_v1=of_order, cancelled_v1=of_order).load()
    (tmp_path / "nothing.sql").write_text("SELECT count(*) FROM new_events;\n")
    spec = declared_sinks.sink(known, "order.placed", projections=tmp_path)
    schemas = [schema for aggregate in known.aggregates.values() for schema in aggregate.schemas]
    sent = [Sent(spec.topics[0], one, "a", uuid7(Random(one.type)), {"id": "a", "number": 1}) for one in schemas]  # noqa: S311
    with closing(connect(databases, SinkRole.OWNER)) as owner:
        with closing(Delivery(Database(databases, owner), spec)) as delivery:
            delivery.apply(placed(sent), {one.event_id for one in sent})
        with owner, owner.cursor() as cursor:
            cursor.execute("SELECT identity FROM dead_letters")
            assert cursor.fetchall() == [(one.event_id,) for one in sent if one.schema.type == "placed"]


def test_a_difference_names_the_row_and_both_values() -> None:
    place = RowPlace("stock", "item_id 1")
    row = {"unit": "KGM", "stock": 1}
    assert difference({place: row}, {place: dict(row)}) is None
    assert difference({place: row}, {}) == Difference(place, row, None)
    changed = difference({place: row}, {place: row | {"stock": 2}})
    assert str(changed) == "table stock, row item_id 1: stock is 1 in the reference and 2 here"
