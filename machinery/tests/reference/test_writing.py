"""Examples of docs/reference.md: write events, with SQLAlchemy, with asyncio, and with a driver alone."""

from __future__ import annotations

import asyncio
import uuid
from contextlib import closing
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from outbox import Event, Failure, Settings, append, load_settings
from outbox_lab.testing import SourceRole, outbox_records
from outbox_lab.walkthrough import connect
from stock.payloads import OrderCancelledV1
from tests.transactions import url

PLACE = text("INSERT INTO orders (id, version) VALUES (:id, 1)")
LATER = text("UPDATE orders SET version = version + 1 WHERE id = :id")


@pytest.fixture
def order_id() -> str:
    return str(uuid.uuid4())


def placed(order_id: str) -> dict[str, Any]:
    """The payload of a placed order."""
    item = str(uuid.uuid4())
    now = datetime.now(UTC)
    return {"order_id": order_id, "item_id": item, "quantity": 2, "unit": "KGM", "version": 1, "occurred_at": now}


def written(settings: Settings) -> list[tuple[str, str]]:
    return [(record["headers"]["eventType"], record["key"]) for record in outbox_records(settings)]


def test_a_change_and_its_events(engine: Engine, databases: Settings, order_id: str) -> None:
    payload = placed(order_id)

    with engine.begin() as connection:
        connection.execute(PLACE, {"id": order_id})
        append(connection, Event("order", order_id, "placed", payload, schema_version=2))

    with engine.begin() as connection:
        connection.execute(LATER, {"id": order_id})
        cancelled = OrderCancelledV1(order_id=uuid.UUID(order_id), version=2, occurred_at=datetime.now(UTC))
        append(connection, Event.of(cancelled))

    assert written(databases) == [("placed", order_id), ("cancelled", order_id)]


def test_a_change_and_its_events_with_asyncio(databases: Settings, order_id: str) -> None:
    from outbox.aio import Event, append

    payload = placed(order_id)
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
    assert written(databases) == [("placed", order_id), ("cancelled", order_id)]


def test_a_change_and_its_event_without_sqlalchemy(databases: Settings, order_id: str) -> None:
    from outbox.dbapi import Event, append

    payload = placed(order_id)

    with closing(connect(databases, SourceRole.APP)) as connection, connection.cursor() as cursor:
        cursor.execute("INSERT INTO orders (id, version) VALUES (%s, 1)", [order_id])
        append(connection, Event("order", order_id, "placed", payload))
        connection.commit()

    assert written(databases) == [("placed", order_id)]


def test_what_append_refuses(engine: Engine, databases: Settings, order_id: str) -> None:
    without_unit = {name: value for name, value in placed(order_id).items() if name != "unit"}
    with engine.begin() as connection, pytest.raises(Failure, match="unit") as failed:
        append(connection, Event("order", order_id, "placed", without_unit, schema_version=2))
    assert failed.value.code == "event-invalid"
    assert written(databases) == []


def test_settings() -> None:
    settings: Settings = load_settings()
    assert settings.topic_prefix == "stock"  # OUTBOX_TOPIC_PREFIX, or [tool.outbox] of pyproject.toml
