"""Examples of docs/reference.md: write events with asyncio."""

from __future__ import annotations

import asyncio
import uuid
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from outbox import Settings
from outbox.aio import Event, append
from outbox_lab.testing import SourceRole, query
from tests.transactions import url

PLACE = text("INSERT INTO orders (id, version) VALUES (:id, 1)")
LATER = text("UPDATE orders SET version = version + 1 WHERE id = :id")


def test_a_change_and_its_events(databases: Settings) -> None:
    order_id, item_id = str(uuid.uuid4()), str(uuid.uuid4())
    placed: dict[str, Any] = {"order_id": order_id, "item_id": item_id, "quantity": 2, "version": 1}
    payload = {**placed, "occurred_at": datetime.now(UTC)}
    cancelled = {"order_id": order_id, "version": 2, "occurred_at": datetime.now(UTC)}

    async def place_and_cancel() -> None:
        engine = create_async_engine(url("asyncpg", databases))

        async with engine.begin() as connection:
            await connection.execute(PLACE, {"id": order_id})
            await append(connection, Event("order", order_id, "placed", payload))

        async with AsyncSession(engine) as session, session.begin():
            await session.execute(LATER, {"id": order_id})
            await append(session, Event("order", order_id, "cancelled", cancelled))

        await engine.dispose()

    asyncio.run(place_and_cancel())
    written = query(
        databases, "SELECT type FROM outbox WHERE aggregateid = %s ORDER BY id", SourceRole.OWNER, [order_id]
    )
    assert written == [("placed",), ("cancelled",)]
