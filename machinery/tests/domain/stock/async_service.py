"""The service of the stock in FastAPI: routes, rules and rows of `stock.service`, written with asyncio."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime
from http import HTTPStatus

from fastapi import APIRouter, FastAPI, HTTPException, Response

from outbox import Settings
from outbox.asgi import READING, SECURITY, WRITING, Change, Kind, Service, WriteHeaders, responses
from stock.service import INSERT, LOCK, READ, UPDATE, Item, Movement, NewMovement, UnitMismatch, event

UNIT_MISMATCH = Kind(HTTPStatus.CONFLICT, "/problems/unit-mismatch", "Unit mismatch")


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

    @api.get("/items/{item_id:uuid}", responses=READING)
    async def read_item(item_id: uuid.UUID) -> Item:
        async with service.engine.connect() as connection:
            row = (await connection.execute(READ, {"item_id": item_id})).mappings().one_or_none()
        if row is None:
            raise HTTPException(HTTPStatus.NOT_FOUND, f"item {item_id} has never moved")
        return Item(**row)

    return service.app(api)


async def move(change: Change, wanted: NewMovement) -> None:
    """Record the movement, or raise UnitMismatch."""
    await change.connection.execute(INSERT, {"item_id": wanted.item_id, "unit": wanted.unit})
    item = Item(**(await change.connection.execute(LOCK, {"item_id": wanted.item_id})).mappings().one())
    if item.unit != wanted.unit:
        raise UnitMismatch(f"item {wanted.item_id} is in {item.unit}")
    stock, version = item.stock + wanted.quantity, item.version + 1
    made = Movement(**wanted.model_dump(), id=uuid.uuid4(), stock_after=stock, occurred_at=datetime.now(UTC))
    if await change.claim(made):
        await change.connection.execute(UPDATE, {"item_id": made.item_id, "stock": stock, "version": version})
        await change.append(event(made, version))
