"""What both adapters have in common: a service and its declared refusals, a change, and the headers of its request."""

from __future__ import annotations

from dataclasses import replace
from http import HTTPStatus
from typing import Generic, TypeVar

from pydantic import BaseModel, Field
from sqlalchemy import Connection

from outbox.base import spans, trace
from outbox.base.settings import Settings, load
from outbox.events.values import encode
from outbox.http.gate import Metrics
from outbox.http.idempotency import Answer, Key, first_answer
from outbox.http.problems import Kinds
from outbox.writing.append import append
from outbox.writing.event import Event

C = TypeVar("C")  # a connection of SQLAlchemy, or one for asyncio

KEY_PATTERN = "^[!-~]{1,255}$"
KEY_DESCRIPTION = (
    "Chosen by the client, one per change. The same key with the same request returns the first"
    " response again, including a refusal; with another request it returns 409. Other errors store nothing:"
    " correct the request or wait, and repeat it with the same key. A key is valid for this client and route, and"
    " is kept for OUTBOX_IDEMPOTENCY_TTL_HOURS, by default one day."
)
TRACEPARENT_DESCRIPTION = "W3C trace context; a valid one is copied into the events, an invalid one is ignored"


class WriteHeaders(BaseModel):
    """The headers of a request that changes something."""

    idempotency_key: str = Field(alias="Idempotency-Key", pattern=KEY_PATTERN, description=KEY_DESCRIPTION)
    traceparent: str | None = Field(None, description=TRACEPARENT_DESCRIPTION)


class BaseService:
    """A service: its settings, metrics and refusals."""

    def __init__(self, title: str, settings: Settings | None, refusals: Kinds | None) -> None:
        self.settings = settings or load()
        self.metrics = Metrics()
        self._title, self._refusals = title, dict(refusals or {})


class BaseChange(Generic[C]):
    """One change, in its transaction. Its SQL is the same for both adapters; `outbox.asgi` awaits it."""

    def __init__(self, connection: C, key: Key, traceparent: str | None = None) -> None:
        """``connection`` is in the transaction, which the caller commits."""
        self.connection = connection
        self.answer: Answer | None = None
        self._key, self._traceparent = key, trace.valid(traceparent)

    def _claim(self, connection: Connection, made: BaseModel, status: HTTPStatus) -> bool:
        self.answer = first_answer(connection, self._key, Answer(status, encode(made).decode()))
        return not self.answer.is_repeated

    def _append(self, connection: Connection, *events: Event) -> None:
        if not spans.are_recorded():  # else the append's own span gives the events a traceparent
            events = tuple(
                one if one.traceparent is not None else replace(one, traceparent=self._traceparent) for one in events
            )
        append(connection, *events)
