"""The service: cars enter a garage and leave it. Row and event are committed together, or not at all."""

from __future__ import annotations

from datetime import UTC, datetime
from http import HTTPStatus

from fastapi import APIRouter, FastAPI, HTTPException, Response
from outbox import Event, Settings
from outbox.asgi import READING, SECURITY, WRITING, Change, Kind, Service, WriteHeaders, responses
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy.ext.asyncio import AsyncSession

from service.garages import Empty, Full, Garage, enter, leave, locked
from service.payloads import GarageEnteredV1, GarageLeftV1

REFUSALS: dict[type[Exception], Kind] = {
    Full: Kind(HTTPStatus.CONFLICT, "/problems/garage-full", "Garage full"),
    Empty: Kind(HTTPStatus.CONFLICT, "/problems/garage-empty", "Garage empty"),
}


class Passage(BaseModel):
    """A car at the barrier of a garage."""

    model_config = ConfigDict(extra="forbid")

    garage: str = Field(pattern="^[a-z][a-z0-9-]{0,39}$", examples=["north"])
    car: str = Field(min_length=1, max_length=16, description="its number plate", examples=["ZH 1234"])


class State(BaseModel):
    """A garage after its latest event."""

    garage: str
    cars: int
    version: int


def create_app(settings: Settings | None = None) -> FastAPI:
    """The ASGI application. Raises Failure if the settings have no token."""
    service = Service("Garages", settings, REFUSALS)
    api = APIRouter(dependencies=SECURITY, responses={**WRITING, **responses(HTTPStatus.CONFLICT)})

    @api.post("/enter", response_model=State)
    async def enter_garage(header: WriteHeaders, body: Passage) -> Response:
        """Let a car in. The first one opens the garage."""
        return (await service.answer(header, body, let_in)).response()

    @api.post("/leave", response_model=State)
    async def leave_garage(header: WriteHeaders, body: Passage) -> Response:
        """Let a car out."""
        return (await service.answer(header, body, let_out)).response()

    reading = APIRouter(dependencies=SECURITY, responses=READING)

    @reading.get("/garages/{garage}")
    async def read_garage(garage: str) -> State:
        """The cars in a garage."""
        async with AsyncSession(service.engine) as session:
            found = await session.get(Garage, garage)
        if found is None:
            raise HTTPException(HTTPStatus.NOT_FOUND, f"there is no garage {garage}")
        return State(garage=found.id, cars=found.cars, version=found.version)

    return service.app(api, reading)


async def let_in(change: Change, wanted: Passage) -> None:
    """Let a car in, or raise Full."""
    garage = await locked(change.session, wanted.garage)
    after = enter(garage)
    if await change.claim(State(garage=garage.id, **after._asdict()), HTTPStatus.OK):
        garage.cars, garage.version = after
        now = datetime.now(UTC)
        entered = GarageEnteredV1(garage=garage.id, car=wanted.car, change=1, occurred_at=now, **after._asdict())
        await change.append(Event.of(entered))


async def let_out(change: Change, wanted: Passage) -> None:
    """Let a car out, or raise Empty."""
    garage = await locked(change.session, wanted.garage)
    after = leave(garage)
    if await change.claim(State(garage=garage.id, **after._asdict()), HTTPStatus.OK):
        garage.cars, garage.version = after
        now = datetime.now(UTC)
        left = GarageLeftV1(garage=garage.id, car=wanted.car, change=-1, occurred_at=now, **after._asdict())
        await change.append(Event.of(left))
