"""The fixture domain's event."""

from __future__ import annotations

from tests.support.shape import Shape

SHAPE = Shape(
    aggregatetype="item",
    type_less="picked",
    type_more="received",
    reference="movement_id",
    key="item_id",
    quantity="quantity",
    unit="unit",
    total_after="stock_after",
    units=("KGM", "LTR"),
)
