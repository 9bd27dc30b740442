"""What both adapters have in common: a service and its declared refusals, and the headers of a change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pydantic import BaseModel, Field

from outbox.base import spans
from outbox.base.settings import Settings, load
from outbox.http.gate import Metrics
from outbox.http.problems import Kinds
from outbox.writing.event import Event

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


def traced(events: Sequence[Event], traceparent: str | None) -> list[Event]:
    """The events; those without a traceparent get this one, unless their append has a span."""
    if spans.are_recorded():
        return list(events)
    return [one if one.traceparent is not None else replace(one, traceparent=traceparent) for one in events]
