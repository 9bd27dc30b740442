"""Examples of docs/reference.md: write events without SQLAlchemy."""

from __future__ import annotations

import uuid
from contextlib import closing
from datetime import UTC, datetime
from typing import Any

from outbox import Settings
from outbox.dbapi import Event, append
from outbox_lab.testing import SourceRole, query
from outbox_lab.walkthrough import connect

PLACE = "INSERT INTO orders (id, version) VALUES (%s, 1)"


def test_a_change_and_its_event(databases: Settings) -> None:
    order_id, item_id = str(uuid.uuid4()), str(uuid.uuid4())
    placed: dict[str, Any] = {"order_id": order_id, "item_id": item_id, "quantity": 2, "version": 1}
    payload = {**placed, "occurred_at": datetime.now(UTC)}

    with closing(connect(databases, SourceRole.APP)) as connection, connection.cursor() as cursor:
        cursor.execute(PLACE, [order_id])
        append(connection, Event("order", order_id, "placed", payload))
        connection.commit()

    both = "SELECT orders.id::text FROM orders JOIN outbox ON aggregateid = orders.id::text"
    assert query(databases, both) == [(order_id,)]
