"""The rules of the stock."""

from __future__ import annotations

import pytest

from service.stock import SoldOut, Stock, add, event, take

TEA = Stock(product="TEA-1", pieces=3, version=7)


def test_a_movement_is_one_more_version() -> None:
    assert add(TEA, 2).after == Stock(product="TEA-1", pieces=5, version=8)
    assert take(TEA, 3).after == Stock(product="TEA-1", pieces=0, version=8)


def test_more_than_there_is_cannot_be_taken() -> None:
    with pytest.raises(SoldOut, match="there are 3 pieces of TEA-1"):
        take(TEA, 4)


def test_the_event_has_the_pieces_that_moved() -> None:
    taken = event(take(TEA, 2))
    assert (taken.type, taken.payload.pieces, taken.payload.version) == ("taken", 2, 8)
