"""How the events of a sink lie in its tables: shared columns, columns of differing types, and a view per event. And how
rows that a transform has returned are joined with the events that it was given.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from typing import Any

import pyarrow as pa
import pytest

from outbox.events.schema import Column, SqlType
from outbox.sink.applying.postgres.applier import Known
from outbox.sink.applying.postgres.transforming import join, storable
from outbox.sink.decoding.batch import Returned
from outbox.sink.decoding.layout import FAILURE, IS_FILTERED, KEY, TYPE, VERSION, Layout
from outbox.sink.decoding.values import Columns
from outbox_lab.testing.failures import raises

ID, PRICE = Column("id", "text", is_nullable=False), Column("price", "bigint", is_nullable=False)
NOTE = Column("note", "text", is_nullable=True)
EXACT = Column("price", "numeric", is_nullable=False)


def test_one_event_has_its_own_columns_and_no_event_type() -> None:
    layout = Layout({"order.placed": [ID, PRICE, NOTE]})
    assert layout.columns == (ID, PRICE, NOTE)
    assert layout.table({}).column_names == ["event_id", "partition", "offset", "id", "price", "note"]


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


@pytest.mark.parametrize(
    ("event", "view"),
    [
        ("order.placed", "new_order_placed"),
        ("order.placed.v1", "new_order_placed_v1"),
        ("Order.Placed-Now", "new_order_placed_now"),
        (f"a.{'x' * 57}", f"new_a_{'x' * 57}"),
    ],
)
def test_a_view_is_called_like_its_event(event: str, view: str) -> None:
    assert Layout({event: [ID]}).views == {view: event}


@pytest.mark.parametrize("names", [("a.b_c", "a.b-c"), ("a.b_c", "a.B_C"), ("a.b_c", "a-b.c"), (f"a.{'x' * 58}",)])
def test_views_of_one_name_or_with_one_that_postgres_would_cut_off_are_refused(names: tuple[str, ...]) -> None:
    with raises("sink-unusable", *names):
        Layout({name: [ID] for name in names})


class TestReturned:
    """Rows that a transform has returned."""

    PLACES = (("a", 0, 0), ("b", 0, 1), ("c", 1, 0))
    KNOWN = Known("order.placed", "id", "number")
    COLUMNS = (Column("total", "bigint", is_nullable=True),)
    PLACE = (("event_id", pa.string()), ("partition", pa.int32()), ("offset", pa.int64()))

    def join(self, *rows: tuple[Any, Any, Any, int], failed: dict[tuple[int, int], str] | None = None) -> pa.Table:
        """Three events, joined with rows of place and total."""

        def table(of: Sequence[tuple[Any, ...]], *more: tuple[str, pa.DataType]) -> pa.Table:
            schema = pa.schema([*self.PLACE, *more])
            return pa.Table.from_pylist([dict(zip(schema.names, row, strict=True)) for row in of], schema)

        events = [(*place, key, number) for place, key, number in zip(self.PLACES, "xyz", (1, 2, 3), strict=True)]
        given = table(events, ("id", pa.string()), ("number", pa.int64()))
        returned = Returned(table(rows, ("total", pa.int64())), failed or {})
        return join("s", given, returned, self.COLUMNS, self.KNOWN)

    def test_each_event_has_a_row_in_its_order_whatever_was_returned(self) -> None:
        found = self.join(("c", 1, 0, 30), failed={(0, 1): "it fails"})
        assert found.select(["event_id", "total", IS_FILTERED, FAILURE, TYPE, KEY, VERSION]).to_pydict() == {
            "event_id": ["a", "b", "c"],
            "total": [None, None, 30],
            IS_FILTERED: [True, False, False],
            FAILURE: [None, "it fails", None],
            TYPE: ["order.placed"] * 3,
            KEY: ["x", "y", "z"],
            VERSION: [1, 2, 3],
        }
        assert self.join()[IS_FILTERED].to_pylist() == [True] * 3

    @pytest.mark.parametrize("order", list(permutations(range(3))))
    def test_the_order_of_what_was_returned_means_nothing(self, order: tuple[int, ...]) -> None:
        found = self.join(*((*self.PLACES[number], 10 * number) for number in order))
        assert (found["event_id"].to_pylist(), found["total"].to_pylist()) == (["a", "b", "c"], [0, 10, 20])
        assert found[IS_FILTERED].to_pylist() == [False] * 3

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
    def test_a_row_of_no_event_and_a_second_one_are_named(self, rows: list[tuple[Any, Any, Any, int]]) -> None:
        with raises("transform-breaks-rule", "event "):
            self.join(*rows)

    @staticmethod
    def stored(type_: SqlType, value: pa.Array) -> list[object]:
        """A value as a column of this type has it."""
        place = {"event_id": ["a"], "partition": pa.array([0], pa.int32()), "offset": pa.array([0], pa.int64())}
        rows = storable(pa.table({**place, "it": value}), [Column("it", type_, is_nullable=True)])
        return list(rows["it"].to_pylist())

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
        with pytest.raises(ValueError, match="column it: "):
            self.stored(type_, value)

    @pytest.mark.parametrize(
        ("type_", "text"),
        [
            *(("numeric", text) for text in ("-1.25e3", "+.5")),
            ("uuid", "0000000A-0000-0000-0000-00000000000B"),
            ("jsonb", "null"),
        ],
    )
    def test_a_value_that_postgres_takes_stays_as_it_is(self, type_: SqlType, text: str) -> None:
        assert self.stored(type_, pa.array([text])) == [text]
