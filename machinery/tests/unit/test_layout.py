"""How the events of a sink lie in its tables: shared columns, columns of differing types, and a view per event."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from outbox.events.schema import Column, SqlType
from outbox.sink.decoding.layout import Layout, view_name
from outbox.sink.decoding.values import Columns, rows_of
from outbox_lab.testing.failures import raises

KEY, PRICE = Column("id", "text", is_nullable=False), Column("price", "bigint", is_nullable=False)
NOTE = Column("note", "text", is_nullable=True)
EXACT = Column("price", "numeric", is_nullable=False)


def names(layout: Layout) -> list[str]:
    return [column.name for column in layout.columns]


def rows(count: int, **columns: Sequence[object]) -> Columns:
    places: Columns = {"event_id": list(map(str, range(count))), "partition": [0] * count}
    return {**places, "offset": list(range(count)), **columns}


class TestColumns:
    def test_one_event_has_its_own_columns_and_no_event_type(self) -> None:
        layout = Layout({"order.placed": [KEY, PRICE, NOTE]})
        assert layout.columns == (KEY, PRICE, NOTE)
        assert not layout.has_types

    def test_several_events_share_columns_of_one_name_and_type(self) -> None:
        layout = Layout({"order.placed": [KEY, PRICE], "order.cancelled": [KEY, NOTE]})
        assert names(layout) == ["event_type", "id", "price", "note"]
        nullable = {column.name: column.is_nullable for column in layout.columns}
        assert nullable == {"event_type": False, "id": False, "price": True, "note": True}

    def test_a_column_that_one_of_them_may_leave_null_is_nullable(self) -> None:
        may_be_null = KEY._replace(is_nullable=True)
        for order in ([KEY, may_be_null], [may_be_null, KEY]):
            layout = Layout({"a.x": [order[0]], "a.y": [order[1]]})
            assert [column.is_nullable for column in layout.columns] == [False, True]

    def test_columns_of_one_name_and_differing_types_are_apart(self) -> None:
        layout = Layout({"a.x": [KEY, PRICE], "a.y": [KEY, EXACT], "b.z": [EXACT]})
        assert names(layout) == ["event_type", "id", "price:bigint", "price:numeric"]
        assert [layout.place(event, "price") for event in layout.types] == [
            "price:bigint",
            "price:numeric",
            "price:numeric",
        ]
        types: list[SqlType] = ["text", "text", "bigint", "numeric"]
        assert [column.type for column in layout.columns] == types

    def test_columns_of_all_events_fit_into_one_table(self) -> None:
        def wide(count: int) -> Sequence[Column]:
            return [Column(f"p{number}", "boolean", is_nullable=True) for number in range(count)]

        others = [column._replace(name=f"q{column.name}") for column in wide(699)]
        assert len(Layout({"a.x": wide(800), "a.y": others}).columns) == 1500
        with raises("sink-unusable", "a.x, a.y have 1501 columns"):
            Layout({"a.x": wide(801), "a.y": others})


class TestRows:
    LAYOUT = Layout({"a.x": [KEY, PRICE], "a.y": [KEY, EXACT, NOTE]})

    def test_rows_of_each_event_have_its_columns_and_its_name(self) -> None:
        found = self.LAYOUT.rows("a.y", rows(2, id=["k", "l"], price=["1.5", "2"], note=["n", None]))
        assert next(rows_of(found)) == {
            "event_id": "0",
            "partition": 0,
            "offset": 0,
            "id": "k",
            "price:numeric": "1.5",
            "note": "n",
            "event_type": "a.y",
        }

    def test_one_table_has_null_where_an_event_lacks_a_column(self) -> None:
        found = self.LAYOUT.table(
            {
                "a.x": rows(1, id=["k"], price=[7]),
                "a.y": rows(1, id=["l"], price=["1.5"], note=[None]),
            }
        )
        columns = ["event_type", "id", "price:bigint", "price:numeric", "note"]
        assert found.select(columns).to_pylist() == [
            dict(zip(columns, ["a.x", "k", 7, None, None], strict=True)),
            dict(zip(columns, ["a.y", "l", None, "1.5", None], strict=True)),
        ]

    def test_no_rows_are_an_empty_table_with_all_columns(self) -> None:
        assert self.LAYOUT.table({}).column_names == ["event_id", "partition", "offset", *names(self.LAYOUT)]


class TestViews:
    @pytest.mark.parametrize(
        ("event", "view"),
        [
            ("order.placed", "new_order_placed"),
            ("order.placed.v1", "new_order_placed_v1"),
            ("order.line.added", "new_order_line_added"),
            ("Order.Placed-Now", "new_order_placed_now"),
        ],
    )
    def test_a_view_is_called_like_its_event(self, event: str, view: str) -> None:
        assert view_name(event) == view
        assert Layout({event: [KEY]}).views == {view: event}

    @pytest.mark.parametrize("other", ["a.b-c", "a.B_C", "a-b.c"])
    def test_two_events_with_one_view_are_refused(self, other: str) -> None:
        with raises("sink-unusable", "a.b_c", other):
            Layout({"a.b_c": [KEY], other: [KEY]})

    def test_a_view_that_postgres_would_cut_off_is_refused(self) -> None:
        longest = "a." + "x" * (63 - len("new_a_"))
        assert len(next(iter(Layout({longest: [KEY]}).views))) == 63
        with raises("sink-unusable", "63"):
            Layout({f"{longest}x": [KEY]})
