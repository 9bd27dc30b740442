"""The target of a handler's sink: a function, and whatever it writes on the connection."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox.base.settings import Settings
from outbox.sink.applying.handlers.handler import Handler
from outbox.sink.spec import SinkSpec, Target, Transformed

if TYPE_CHECKING:
    from psycopg2 import extensions

    from outbox.sink.applying.handlers.writer import HandlerApplier, HandlerWriter
    from outbox.sink.decoding.records import Fetch


class HandlerTarget(Target):
    """A function, and whatever it writes on the connection."""

    engines = ("plain",)
    records_max = 500  # in one transaction, whose locks others may wait for
    rebuilt_from = ()
    not_rebuilt = (
        "is a function: what it has done cannot be computed again",
        "`outbox dead-letters replay --sink {}` calls it for events that were set aside",
    )

    def __init__(self, of: Handler) -> None:
        self._handler = of
        self.begin = of.begin

    def writer(
        self, settings: Settings, connection: extensions.connection, spec: SinkSpec, fetch: Fetch
    ) -> HandlerWriter:
        from outbox.sink.applying.handlers.writer import HandlerWriter

        return HandlerWriter(settings, connection, spec, fetch, self._handler)

    def applier(self, settings: Settings, spec: SinkSpec, transform: Transformed | None = None) -> HandlerApplier:
        from outbox.sink.applying.handlers.writer import HandlerApplier

        del settings, transform
        return HandlerApplier(spec, self._handler)
