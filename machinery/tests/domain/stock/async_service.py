"""The service of the stock in FastAPI: route, rules and rows of `stock.service`, written with asyncio."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime
from http import HTTPStatus

from fastapi import APIRouter, FastAPI, Response
from sqlalchemy.ext.asyncio import AsyncConnection

from outbox import Settings
from outbox.asgi import SECURITY, WRITING, Change, Service, WriteHeaders, responses
from stock.service import (
    INSERT,
    LOCK,
    UNIT_MISMATCH,
    UPDATE,
    Item,
    Movement,
    NewMovement,
    UnitMismatch,
    event,
)


def create_app(settings: Settings | None = None) -> FastAPI:
    """The stock service. Raises Failure if the settings have no token."""
    service = Service("Stock", settings, {UnitMismatch: UNIT_MISMATCH})
    api = APIRouter(dependencies=SECURITY)

    @api.post(
        "/movements",
        status_code=HTTPStatus.CREATED,
        response_model=Movement,
        responses={**WRITING, **responses(HTTPStatus.CONFLICT)},
    )
    async def record_movement(header: WriteHeaders, body: NewMovement) -> Response:
        """Record a movement. The first movement of an item decides its unit."""
        return (await service.answer(header, body, move)).response()

    return service.app(api)


async def move(change: Change, wanted: NewMovement) -> None:
    """Record the movement, or raise UnitMismatch."""
    item = await _lock(change.connection, wanted)
    if item.unit != wanted.unit:
        raise UnitMismatch(f"item {wanted.item_id} is in {item.unit}")
    after = Item(item.unit, item.stock + wanted.quantity, item.version + 1)
    made = Movement(**wanted.model_dump(), id=uuid.uuid4(), stock_after=after.stock, occurred_at=datetime.now(UTC))
    if await change.claim(made):
        parameters = {"item_id": made.item_id, "stock": after.stock, "version": after.version}
        await change.connection.execute(UPDATE, parameters)
        await change.append(event(made, after.version))


async def _lock(connection: AsyncConnection, wanted: NewMovement) -> Item:
    """Lock the item until the end of the transaction; its first movement inserts it."""
    await connection.execute(INSERT, {"item_id": wanted.item_id, "unit": wanted.unit})
    return Item(*(await connection.execute(LOCK, {"item_id": wanted.item_id})).one())
