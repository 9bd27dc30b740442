"""The service: one route, which moves stock. The rows and the event are written in one transaction."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Annotated, NamedTuple

from flask import Flask, Response
from flask_openapi3.blueprint import APIBlueprint
from pydantic import BaseModel, ConfigDict, Field, StrictInt, field_validator
from pydantic_core import PydanticCustomError
from sqlalchemy import Connection, text

from outbox import Event, Settings
from outbox.web import SECURITY, WRITING, Change, Kind, Service, WriteHeaders, responses

QUANTITY_MAX = 2**31 - 1  # so that no stock overflows within a lifetime of movements
UNIT_MISMATCH = Kind(HTTPStatus.CONFLICT, "/problems/unit-mismatch", "Unit mismatch")

INSERT = text("INSERT INTO items (id, unit, stock, version) VALUES (:item_id, :unit, 0, 0) ON CONFLICT DO NOTHING")
LOCK = text("SELECT unit, stock, version FROM items WHERE id = :item_id FOR NO KEY UPDATE")
UPDATE = text("UPDATE items SET stock = :stock, version = :version WHERE id = :item_id")


class Item(NamedTuple):
    """An item as it is in one version."""

    unit: str
    stock: int
    version: int


class NewMovement(BaseModel):
    """A movement to record."""

    model_config = ConfigDict(extra="forbid")

    item_id: uuid.UUID
    quantity: Annotated[StrictInt, Field(ge=-QUANTITY_MAX, le=QUANTITY_MAX, description="negative for a pick")]
    unit: Annotated[str, Field(pattern="^[A-Z]{3}$", examples=["KGM"])]

    @field_validator("quantity")
    @classmethod
    def _moves(cls, quantity: int) -> int:
        if quantity == 0:
            raise PydanticCustomError("no_movement", "Input should not be 0")
        return quantity


class Movement(NewMovement):
    """A recorded movement."""

    id: uuid.UUID
    stock_after: int
    occurred_at: datetime


class UnitMismatch(Exception):
    """The item is in another unit."""


def create_app(settings: Settings | None = None) -> Flask:
    """The stock service. Raises Failure if the settings have no token."""
    service = Service("Stock", settings, {UnitMismatch: UNIT_MISMATCH})
    return service.app(stock_api(service))


def stock_api(service: Service) -> APIBlueprint:
    """The route of the service."""
    api = APIBlueprint("stock", __name__, abp_security=SECURITY)

    @api.post("/movements", responses={HTTPStatus.CREATED: Movement, **WRITING, **responses(HTTPStatus.CONFLICT)})
    def record_movement(header: WriteHeaders, body: NewMovement) -> Response:
        """Record a movement. The first movement of an item decides its unit."""
        return service.answer(header, body, move).response()

    return api


def move(change: Change, wanted: NewMovement) -> None:
    """Record the movement, or raise UnitMismatch."""
    item = _lock(change.connection, wanted)
    if item.unit != wanted.unit:
        raise UnitMismatch(f"item {wanted.item_id} is in {item.unit}")
    after = Item(item.unit, item.stock + wanted.quantity, item.version + 1)
    made = Movement(**wanted.model_dump(), id=uuid.uuid4(), stock_after=after.stock, occurred_at=datetime.now(UTC))
    if change.claim(made):
        parameters = {"item_id": made.item_id, "stock": after.stock, "version": after.version}
        change.connection.execute(UPDATE, parameters)
        change.append(event(made, after.version))


def _lock(connection: Connection, wanted: NewMovement) -> Item:
    """Lock the item until the end of the transaction; its first movement inserts it."""
    connection.execute(INSERT, {"item_id": wanted.item_id, "unit": wanted.unit})
    return Item(*connection.execute(LOCK, {"item_id": wanted.item_id}).one())


def event(made: Movement, version: int) -> Event:
    """The event of a movement, as defined by events/item."""
    return Event(
        aggregatetype="item",
        aggregateid=str(made.item_id),
        type="received" if made.quantity > 0 else "picked",
        payload={
            "movement_id": str(made.id),
            "item_id": str(made.item_id),
            "quantity": made.quantity,
            "unit": made.unit,
            "stock_after": made.stock_after,
            "version": version,
            "occurred_at": made.occurred_at.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        },
    )
