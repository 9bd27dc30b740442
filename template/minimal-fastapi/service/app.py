"""The service: one route, which records parcels that arrive at a depot. Row and event go into one transaction."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, FastAPI, Response
from outbox import Event, Settings
from outbox.asgi import SECURITY, WRITING, Change, Service, WriteHeaders
from pydantic import BaseModel, ConfigDict, Field, StrictInt
from sqlalchemy import text

from service.payloads import DepotReceivedV1

COUNT_MAX = 1_000_000
ADD = text("""
    INSERT INTO depots AS stored (id, parcels, version) VALUES (:depot_id, :count, 1)
    ON CONFLICT (id) DO UPDATE SET parcels = stored.parcels + excluded.parcels, version = stored.version + 1
    RETURNING version
""")


class NewArrival(BaseModel):
    """Parcels that arrive at a depot. The first arrival opens the depot."""

    model_config = ConfigDict(extra="forbid")

    depot_id: uuid.UUID
    count: Annotated[StrictInt, Field(ge=1, le=COUNT_MAX, description="how many parcels")]


class Arrival(NewArrival):
    """A recorded arrival."""

    id: uuid.UUID
    occurred_at: datetime


def create_app(settings: Settings | None = None) -> FastAPI:
    """The ASGI application. Raises Failure if the settings have no token."""
    service = Service("Parcels", settings)
    return service.app(parcels_api(service))


def parcels_api(service: Service) -> APIRouter:
    """The routes of the service."""
    api = APIRouter(dependencies=SECURITY, responses=WRITING)

    @api.post("/parcels", status_code=HTTPStatus.CREATED, response_model=Arrival)
    async def record_arrival(header: WriteHeaders, body: NewArrival) -> Response:
        """Record parcels that have arrived at a depot."""
        return (await service.answer(header, body, record)).response()

    return api


async def record(change: Change, wanted: NewArrival) -> None:
    """Record the arrival: the depot's row, the event and the answer, or nothing."""
    made = Arrival(**wanted.model_dump(), id=uuid.uuid4(), occurred_at=datetime.now(UTC))
    if await change.claim(made):
        version = (await change.connection.execute(ADD, wanted.model_dump())).scalar_one()
        await change.append(_event(made, version))


def _event(made: Arrival, version: int) -> Event:
    """The event of an arrival, typed by connect/events/depot."""
    return Event.of(
        DepotReceivedV1(
            arrival_id=made.id,
            depot_id=made.depot_id,
            count=made.count,
            version=version,
            occurred_at=made.occurred_at,
        )
    )
