"""Examples of docs/reference.md: a FastAPI service."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from http import HTTPStatus

import pytest
from fastapi import APIRouter, FastAPI, HTTPException, Response

from outbox import Event, Settings
from outbox.asgi import READING, SECURITY, WRITING, Change, Kind, Service, WriteHeaders, responses
from outbox_lab.testing import ServiceClient, as_wsgi
from stock.payloads import OrderCancelledV1, OrderPlacedV2
from tests.reference.test_web import (
    LOCK,
    PLACE,
    READ,
    UPDATE,
    AlreadyCancelled,
    NewOrder,
    Order,
    test_place_read_and_cancel,
    test_what_does_not_exist,
)

__all__ = ["test_place_read_and_cancel", "test_what_does_not_exist"]  # with the client of this module


def create_app(settings: Settings | None = None) -> FastAPI:
    cancelled = Kind(HTTPStatus.CONFLICT, "/problems/already-cancelled", "Already cancelled")
    service = Service("Orders", settings, refusals={AlreadyCancelled: cancelled})
    api = APIRouter(dependencies=SECURITY)

    @api.post("/orders", status_code=HTTPStatus.CREATED, response_model=Order, responses=WRITING)
    async def place_order(header: WriteHeaders, body: NewOrder) -> Response:
        return (await service.answer(header, body, place)).response("/orders")

    @api.post(
        "/orders/{order_id:uuid}/cancel",
        response_model=Order,
        responses={**WRITING, **responses(HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT)},
    )
    async def cancel_order(header: WriteHeaders, order_id: uuid.UUID) -> Response:
        return (await service.answer(header, order_id, cancel)).response()

    @api.get("/orders/{order_id:uuid}", responses=READING)
    async def read_order(order_id: uuid.UUID) -> Order:
        async with service.engine.connect() as connection:
            row = (await connection.execute(READ, {"id": order_id})).mappings().one_or_none()
        if row is None:
            raise HTTPException(HTTPStatus.NOT_FOUND, f"order {order_id} does not exist")
        return Order(**row)

    return service.app(api)


async def place(change: Change, wanted: NewOrder) -> None:
    order = Order(id=uuid.uuid4(), version=1)
    if await change.claim(order):
        await change.connection.execute(PLACE, order.model_dump())
        placed = OrderPlacedV2(
            order_id=order.id,
            item_id=wanted.item_id,
            quantity=wanted.quantity,
            unit="KGM",
            version=order.version,
            occurred_at=datetime.now(UTC),
        )
        await change.append(Event.of(placed))


async def cancel(change: Change, order_id: uuid.UUID) -> None:
    row = (await change.connection.execute(LOCK, {"id": order_id})).mappings().one_or_none()
    if row is None:
        raise HTTPException(404, f"order {order_id} does not exist")  # an error: nothing is stored under the key
    if row["version"] > 1:
        raise AlreadyCancelled(f"order {order_id} is cancelled")  # a refusal: stored, with its problem
    after = Order(id=order_id, version=row["version"] + 1)
    if await change.claim(after, HTTPStatus.OK):
        await change.connection.execute(UPDATE, after.model_dump())
        cancelled = OrderCancelledV1(order_id=after.id, version=after.version, occurred_at=datetime.now(UTC))
        await change.append(Event.of(cancelled))


@pytest.fixture
def client(databases: Settings) -> Iterator[ServiceClient]:
    with as_wsgi(create_app(databases)) as app:
        yield ServiceClient(app, databases)
