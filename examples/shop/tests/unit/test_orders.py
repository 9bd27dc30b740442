"""The rules of orders."""

from __future__ import annotations

import pytest

from service.orders import AlreadyCancelled, Line, cancel, event, place

LINES = [Line(product="TEA-1", pieces=2, cents=450), Line(product="CUP-7", pieces=1, cents=1200)]


def test_an_order_is_the_sum_of_its_lines() -> None:
    order = place(LINES)
    assert (order.cents, order.pieces) == (2100, 3)


def test_an_order_is_cancelled_once() -> None:
    order = cancel(place(LINES))
    assert (order.status, order.version) == ("cancelled", 2)
    with pytest.raises(AlreadyCancelled):
        cancel(order)


def test_the_events_of_a_cancelled_order_add_up_to_nothing() -> None:
    order = place(LINES)
    assert [event(one).payload.cents for one in (order, cancel(order))] == [2100, -2100]
