"""The target of a handler's sink: a function, and whatever it writes on the connection."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox.base.errors import Failure
from outbox.base.settings import Settings
from outbox.sink.applying.handlers.handler import Handler
from outbox.sink.spec import SinkSpec, Target, Transformed

if TYPE_CHECKING:
    from psycopg2 import extensions

    from outbox.sink.applying.handlers.writer import HandlerApplier, HandlerWriter
    from outbox.sink.decoding.records import Fetch

EVENTS_MAX = 500  # in one transaction, whose locks others may wait for


class HandlerTarget(Target):
    """A function, and whatever it writes on the connection."""

    engines = ("plain",)
    records_max = EVENTS_MAX

    def __init__(self, of: Handler) -> None:
        self._handler = of
        self.begin = of.begin

    def require_rebuildable(self, spec: SinkSpec, source: str) -> None:
        del source
        raise Failure(
            f"handler {spec.name} is a function: what it has done cannot be computed again",
            f"`outbox dead-letters replay --sink {spec.name}` calls it for events that were set aside",
            code="rebuild-unsupported",
        )

    def writer(
        self, settings: Settings, connection: extensions.connection, spec: SinkSpec, fetch: Fetch
    ) -> HandlerWriter:
        from outbox.sink.applying.handlers.writer import HandlerWriter

        return HandlerWriter(settings, connection, spec, fetch, self._handler)

    def applier(self, settings: Settings, spec: SinkSpec, transform: Transformed | None = None) -> HandlerApplier:
        from outbox.sink.applying.handlers.writer import HandlerApplier

        del settings, transform
        return HandlerApplier(spec, self._handler)
