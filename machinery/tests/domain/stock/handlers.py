"""The handlers of the stock: a receipt for each delivery of an item and for each order, and a notice of deliveries."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox.handlers import AsyncConnection, Event, handler

if TYPE_CHECKING:
    from psycopg2.extensions import connection

INSERT = """
INSERT INTO handled_events (handler, event_id, key, version, place)
SELECT %(handler)s, %(id)s, %(key)s, %(version)s, count(*) + 1
  FROM handled_events WHERE (handler, key) = (%(handler)s, %(key)s)
"""


@handler("item")
def item_receipts(event: Event, connection: connection) -> None:
    """Write a receipt for an item."""
    with connection.cursor() as cursor:
        cursor.execute(INSERT, {**event._asdict(), "handler": "item_receipts", "payload": None})


@handler("order", workers=3)
async def order_receipts(event: Event, connection: AsyncConnection) -> None:
    """Write a receipt for an order."""
    await connection.execute(INSERT, {**event._asdict(), "handler": "order_receipts", "payload": None})


@handler("item", workers=8)
def item_notices(event: Event, connection: connection) -> None:
    """Write a notice for an item, for several items at the same time."""
    with connection.cursor() as cursor:
        cursor.execute(INSERT, {**event._asdict(), "handler": "item_notices", "payload": None})
