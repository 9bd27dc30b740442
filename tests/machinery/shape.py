"""The fixture domain's event."""

from __future__ import annotations

from tests.support.paths import ROOT
from tests.support.shape import Shape

SHAPE = Shape(
    schema_file=ROOT / "tests" / "machinery" / "domain" / "events" / "item-event.v1.schema.json",
    aggregatetype="item",
    type_less="item.picked",
    type_more="item.received",
    reference="movement_id",
    key="item_id",
    quantity="quantity",
    unit="unit",
    total_after="stock_after",
    units=("KGM", "LTR"),
)
