"""How the fixture domain words its events of items."""

from __future__ import annotations

AGGREGATE = "item"
LESS, MORE = "picked", "received"  # event types, by the sign of the quantity
UNIT, OTHER_UNIT = "KGM", "LTR"
OCCURRED_AT = "2026-11-21T05:00:00.123456Z"


def type_of(quantity: int) -> str:
    """The type of an event with this quantity."""
    return MORE if quantity > 0 else LESS


def payload(
    reference: str, key: str, quantity: int, version: int, *, unit: str = UNIT, total_after: int = 0
) -> dict[str, object]:
    """The value of a record."""
    return {
        "movement_id": reference,
        "item_id": key,
        "quantity": quantity,
        "unit": unit,
        "stock_after": total_after,
        "version": version,
        "occurred_at": OCCURRED_AT,
    }
