"""The service: a route that moves stock, and one that reads it. Rows and event are written in one transaction."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Annotated

from flask import Flask, Response
from flask_openapi3.blueprint import APIBlueprint
from pydantic import BaseModel, ConfigDict, Field, StrictInt, field_validator
from pydantic_core import PydanticCustomError
from sqlalchemy import text
from werkzeug.exceptions import NotFound

from outbox import Event, Settings
from outbox.web import READING, SECURITY, WRITING, Change, Kind, Service, WriteHeaders, responses

QUANTITY_MAX = 2**31 - 1  # so that no stock overflows within a lifetime of movements
UNIT_MISMATCH = Kind(HTTPStatus.CONFLICT, "/problems/unit-mismatch", "Unit mismatch")

INSERT = text("INSERT INTO items (id, unit, stock, version) VALUES (:item_id, :unit, 0, 0) ON CONFLICT DO NOTHING")
READ = text("SELECT unit, stock, version FROM items WHERE id = :item_id")
LOCK = text(f"{READ} FOR NO KEY UPDATE")
UPDATE = text("UPDATE items SET stock = :stock, version = :version WHERE id = :item_id")


class ItemPath(BaseModel):
    """The item in the path."""

    item_id: uuid.UUID


class Item(BaseModel):
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
    api = APIBlueprint("stock", __name__, abp_security=SECURITY)

    @api.post("/movements", responses={HTTPStatus.CREATED: Movement, **WRITING, **responses(HTTPStatus.CONFLICT)})
    def record_movement(header: WriteHeaders, body: NewMovement) -> Response:
        """Record a movement. The first movement of an item decides its unit."""
        return service.answer(header, body, move).response()

    @api.get("/items/<uuid:item_id>", responses={HTTPStatus.OK: Item, **READING})
    def read_item(path: ItemPath) -> Response:
        with service.engine.connect() as connection:
            row = connection.execute(READ, {"item_id": path.item_id}).mappings().one_or_none()
        if row is None:
            raise NotFound(f"item {path.item_id} has never moved")
        return Response(Item(**row).model_dump_json(), mimetype="application/json")

    return service.app(api)


def move(change: Change, wanted: NewMovement) -> None:
    """Record the movement, or raise UnitMismatch. The first movement of an item inserts it; the others lock it."""
    change.connection.execute(INSERT, {"item_id": wanted.item_id, "unit": wanted.unit})
    item = Item(**change.connection.execute(LOCK, {"item_id": wanted.item_id}).mappings().one())
    if item.unit != wanted.unit:
        raise UnitMismatch(f"item {wanted.item_id} is in {item.unit}")
    stock, version = item.stock + wanted.quantity, item.version + 1
    made = Movement(**wanted.model_dump(), id=uuid.uuid4(), stock_after=stock, occurred_at=datetime.now(UTC))
    if change.claim(made):
        change.connection.execute(UPDATE, {"item_id": made.item_id, "stock": stock, "version": version})
        change.append(event(made, version))


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
