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
from sqlalchemy import Connection, Engine, text

from outbox.base import settings as configuration
from outbox.base import trace
from outbox.base.settings import Settings
from outbox.http import idempotency, problems
from outbox.http.app import make_app
from outbox.http.auth import SECURITY
from outbox.http.database import make_engine
from outbox.http.idempotency import Answer, Key
from outbox.http.metrics import Metrics
from outbox.http.problems import WRITING, Kind, responses
from outbox.writing.append import Event, append

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


class MovementHeaders(BaseModel):
    """The headers of a movement's request."""

    idempotency_key: str = Field(alias="Idempotency-Key", pattern="^[!-~]{1,255}$")
    traceparent: str | None = None


def create_app(settings: Settings | None = None) -> Flask:
    """The stock service. Raises Failure if the settings have no token."""
    settings = settings or configuration.load()
    engine = make_engine(settings)
    return make_app(settings, engine, Metrics(), title="Stock", apis=[stock_api(engine, settings)])


def stock_api(engine: Engine, settings: Settings) -> APIBlueprint:
    """The route of the service."""
    api = APIBlueprint("stock", __name__, abp_security=SECURITY)

    @api.post("/movements", responses={HTTPStatus.CREATED: Movement, **WRITING, **responses(HTTPStatus.CONFLICT)})
    def record_movement(header: MovementHeaders, body: NewMovement) -> Response:
        """Record a movement. The first movement of an item decides its unit."""
        key = Key.of("POST /movements", header.idempotency_key, body, settings.idempotency_ttl_hours)
        with engine.begin() as connection:
            answer = move(connection, body, key, trace.valid(header.traceparent))
        is_created = answer.status == HTTPStatus.CREATED
        return Response(answer.body, answer.status, mimetype="application/json" if is_created else problems.MEDIA_TYPE)

    return api


def move(connection: Connection, wanted: NewMovement, key: Key, traceparent: str | None = None) -> Answer:
    """Record the movement or refuse it, in the caller's transaction; either answer is stored under the key.

    The order is: lock, decide, claim the key, write. Never commits. Raises KeyReused if another request has claimed the
    key.
    """
    item = _lock(connection, wanted)
    if item.unit != wanted.unit:
        problem = problems.of_kind(UNIT_MISMATCH, f"item {wanted.item_id} is in {item.unit}")
        return idempotency.first_answer(connection, key, Answer(problem.status, problems.dump(problem)))
    after = Item(item.unit, item.stock + wanted.quantity, item.version + 1)
    made = Movement(**wanted.model_dump(), id=uuid.uuid4(), stock_after=after.stock, occurred_at=datetime.now(UTC))
    answer = idempotency.first_answer(connection, key, Answer(HTTPStatus.CREATED, made.model_dump_json()))
    if not answer.is_repeated:
        connection.execute(UPDATE, {"item_id": made.item_id, "stock": after.stock, "version": after.version})
        append(connection, _event(made, after.version, traceparent))
    return answer


def _lock(connection: Connection, wanted: NewMovement) -> Item:
    """Lock the item until the end of the transaction; its first movement inserts it."""
    connection.execute(INSERT, {"item_id": wanted.item_id, "unit": wanted.unit})
    return Item(*connection.execute(LOCK, {"item_id": wanted.item_id}).one())


def _event(made: Movement, version: int, traceparent: str | None) -> Event:
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
        traceparent=traceparent,
    )
