"""A service that writes with the outbox: its database, its metrics, and its answers to requests for a change.

    service = Service("Orders", refusals={SoldOut: Kind(HTTPStatus.CONFLICT, "/problems/sold-out", "Sold out")})
    api = APIBlueprint("orders", __name__, abp_security=SECURITY)

    @api.post("/orders", responses={HTTPStatus.CREATED: Order, **WRITING})
    def make_order(header: WriteHeaders, body: NewOrder) -> Response:
        return service.answer(header, body, place).response("/orders")

    def place(change: Change, wanted: NewOrder) -> None:
        order = Order(id=uuid4(), **dict(wanted))
        if change.claim(order):
            change.connection.execute(...)
            change.append(Event("order", str(order.id), "placed", {...}))

    app = service.app(api)

The order of work in a change is: lock, decide, claim the key, write.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from http import HTTPStatus
from typing import TypeVar

from flask import Flask, request
from flask_openapi3.blueprint import APIBlueprint
from pydantic import BaseModel, Field
from sqlalchemy import Connection, Engine

from outbox.base import trace
from outbox.base.settings import Settings, load
from outbox.events.values import encode
from outbox.http import idempotency, problems
from outbox.http.app import Metrics, make_app
from outbox.http.database import make_engine
from outbox.http.idempotency import Answer, Key
from outbox.http.problems import Kind
from outbox.writing.append import append
from outbox.writing.event import Event

B = TypeVar("B")


class WriteHeaders(BaseModel):
    """The headers of a request that changes something."""

    idempotency_key: str = Field(
        alias="Idempotency-Key",
        pattern="^[!-~]{1,255}$",
        description="Chosen by the client, one per change. The same key with the same request returns the first"
        " response again, including a refusal; with another request it returns 409. Other errors store nothing:"
        " correct the request or wait, and repeat it with the same key. A key is valid for this client and route, and"
        " is kept for OUTBOX_IDEMPOTENCY_TTL_HOURS, by default one day.",
    )
    traceparent: str | None = Field(
        None,
        description="W3C trace context; a valid one is copied into the events, an invalid one is ignored",
    )


class Change:
    """One change, in its transaction."""

    def __init__(self, connection: Connection, key: Key, traceparent: str | None = None) -> None:
        """``connection`` is in the transaction, which the caller commits."""
        self.connection = connection
        self.answer: Answer | None = None
        self._key, self._traceparent = key, trace.valid(traceparent)

    def claim(self, made: BaseModel, status: HTTPStatus = HTTPStatus.CREATED) -> bool:
        """Claim the request's key for this answer, before anything is written.

        False if the key is taken: then write nothing, because the client gets the first answer. Raises KeyReused if
        another request has claimed the key, and ValueError for an answer that JSON cannot express, such as NaN.
        """
        self.answer = idempotency.first_answer(self.connection, self._key, Answer(status, encode(made).decode()))
        return not self.answer.is_repeated

    def append(self, *events: Event) -> None:
        """Append events to the outbox (`outbox.writing.append.append`).

        An event without a traceparent gets that of the request.
        """
        append(self.connection, *map(self._traced, events))

    def _traced(self, event: Event) -> Event:
        return event if event.traceparent is not None else replace(event, traceparent=self._traceparent)


class Service:
    """A service and its database."""

    def __init__(
        self,
        title: str,
        settings: Settings | None = None,
        refusals: Mapping[type[Exception], Kind] | None = None,
    ) -> None:
        """``refusals`` are the exceptions by which the service refuses a request, and the problem that each becomes.

        Nothing connects to the database before the first request that needs it.
        """
        self.settings = settings or load()
        self.engine: Engine = make_engine(self.settings)
        self.metrics = Metrics()
        self._title, self._refusals = title, dict(refusals or {})

    def app(self, *apis: APIBlueprint) -> Flask:
        """The WSGI application. Raises Failure if the settings have no token."""
        return make_app(self.settings, self.engine, self.metrics, title=self._title, apis=apis, refusals=self._refusals)

    def answer(self, header: WriteHeaders, body: B, change: Callable[[Change, B], None]) -> Answer:
        """Make a change in a transaction of its own, within a request. The answer is stored under the request's key, in
        that transaction.

        ``change`` gets ``body``, which may hold whatever the route has taken from the request. A retry is recognised by
        the request itself: its method, path, query and JSON body.

        The order in ``change`` is: lock, decide, claim, write. A refusal that it raises rolls everything back, and is
        stored under the key too. Raises KeyReused if another request has claimed the key.
        """
        key = Key.of_request(request, header.idempotency_key, self.settings.idempotency_ttl_hours)
        try:
            with self.engine.begin() as connection:
                made = Change(connection, key, header.traceparent)
                change(made, body)
                if made.answer is None:
                    raise RuntimeError(f"the change of {key.route} has claimed no answer")
                return made.answer
        except tuple(self._refusals) as refusal:
            problem = problems.of_kind(self._kind(refusal), str(refusal))
            with self.engine.begin() as connection:
                return idempotency.first_answer(connection, key, Answer(problem.status, problems.dump(problem)))

    def _kind(self, refusal: Exception) -> Kind:
        """The problem of the nearest class that is declared."""
        return next(self._refusals[type_] for type_ in type(refusal).__mro__ if type_ in self._refusals)
