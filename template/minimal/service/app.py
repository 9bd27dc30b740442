"""The service: one route, which records parcels that arrive at a depot. Row and event go into one transaction."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Annotated

from flask import Flask, Response
from flask_openapi3.blueprint import APIBlueprint
from pydantic import BaseModel, ConfigDict, Field, StrictInt
from sqlalchemy import Connection, Engine, text

from outbox.base import settings as configuration
from outbox.base import trace
from outbox.base.settings import Settings
from outbox.http import idempotency
from outbox.http.app import make_app
from outbox.http.auth import SECURITY
from outbox.http.database import make_engine
from outbox.http.idempotency import Answer, Key
from outbox.http.metrics import Metrics
from outbox.http.problems import WRITING
from outbox.writing.append import Event, append

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


class ArrivalHeaders(BaseModel):
    """The headers of a request."""

    idempotency_key: str = Field(alias="Idempotency-Key", pattern="^[!-~]{1,255}$")
    traceparent: str | None = None


def create_app(settings: Settings | None = None) -> Flask:
    """The WSGI application. Raises Failure if the settings have no token."""
    settings = settings or configuration.load()
    engine = make_engine(settings)
    return make_app(settings, engine, Metrics(), title="Parcels", apis=[parcels_api(engine, settings)])


def parcels_api(engine: Engine, settings: Settings) -> APIBlueprint:
    """The routes of the service."""
    api = APIBlueprint("parcels", __name__, abp_security=SECURITY)

    @api.post("/parcels", responses={HTTPStatus.CREATED: Arrival, **WRITING})
    def record_arrival(header: ArrivalHeaders, body: NewArrival) -> Response:
        """Record parcels that have arrived at a depot."""
        key = Key.of("POST /parcels", header.idempotency_key, body, settings.idempotency_ttl_hours)
        with engine.begin() as connection:
            answer = record(connection, body, key, trace.valid(header.traceparent))
        return Response(answer.body, answer.status, mimetype="application/json")

    return api


def record(connection: Connection, wanted: NewArrival, key: Key, traceparent: str | None = None) -> Answer:
    """Record the arrival in the caller's transaction: the depot's row, the event and the answer, or nothing.

    Never commits. A key that is taken writes nothing and returns the first answer. Raises KeyReused if another request
    has claimed the key.
    """
    made = Arrival(**wanted.model_dump(), id=uuid.uuid4(), occurred_at=datetime.now(UTC))
    answer = idempotency.first_answer(connection, key, Answer(HTTPStatus.CREATED, made.model_dump_json()))
    if not answer.is_repeated:
        version = connection.execute(ADD, wanted.model_dump()).scalar_one()
        append(connection, _event(made, version, traceparent))
    return answer


def _event(made: Arrival, version: int, traceparent: str | None) -> Event:
    """The event of an arrival, as connect/events/depot declares it."""
    return Event(
        aggregatetype="depot",
        aggregateid=str(made.depot_id),
        type="received",
        payload={
            "arrival_id": str(made.id),
            "depot_id": str(made.depot_id),
            "count": made.count,
            "version": version,
            "occurred_at": made.occurred_at.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        },
        traceparent=traceparent,
    )
