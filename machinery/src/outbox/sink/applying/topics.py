"""The target in a Kafka topic: each new event is a record there, in one transaction with the offsets of its batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outbox.base.settings import Settings
from outbox.sink.applying.handlers.handler import Event
from outbox.sink.spec import SinkSpec, Target, TargetState, Transformed, function_of, unusable

if TYPE_CHECKING:
    from psycopg2 import extensions

    from outbox.sink.applying.topic_writer import TopicApplier, TopicWriter
    from outbox.sink.decoding.records import Fetch

DEFERRED = (inspect.iscoroutinefunction, inspect.isasyncgenfunction, inspect.isgeneratorfunction)


@dataclass(frozen=True)
class TopicTarget(Target):
    """A topic. ``by`` names a function, as ``module:function``, that gets each event and returns the event to write:
    with another key, type or payload, or None for none. The record has the id of the event that the function got.
    """

    topic: str
    by: str | None = None
    takes_projections = False
    rebuilt_from = ()
    not_rebuilt = (
        "writes to a topic, which takes nothing back",
        "a sink of another name, with another topic, begins anew",
    )

    @property
    def topics(self) -> list[str]:
        return [self.topic]

    def require_usable(self, spec: SinkSpec) -> None:
        super().require_usable(spec)
        function = self._function(spec)
        if any(is_deferred(function) for is_deferred in DEFERRED):
            problem = f"its by {self.by} is async or a generator, so a call of it returns no event"
            raise unusable(spec.job, problem, "write a plain function that returns the event")
        if self.topic in spec.topics:
            raise unusable(spec.job, f"it writes to a topic that it reads, {self.topic}", "name another topic")
        if not spec.job.events:
            raise unusable(spec.job, "a topic takes declared events only", 'name them: events=["order.placed"]')

    def writer(
        self, settings: Settings, connection: extensions.connection, spec: SinkSpec, fetch: Fetch
    ) -> TopicWriter:
        from outbox.sink.applying.topic_writer import TopicWriter

        self.require_usable(spec)
        return TopicWriter(settings, connection, spec, fetch, self._function(spec))

    def applier(self, settings: Settings, spec: SinkSpec, transform: Transformed | None = None) -> TopicApplier:
        from outbox.sink.applying.topic_writer import applier

        return applier(settings, spec, self._function(spec), transform, ".replay")

    def state(self, settings: Settings, spec: SinkSpec) -> TargetState:
        from outbox.sink.applying.topic_writer import state

        return state(settings, spec.name, self.topic)

    def _function(self, spec: SinkSpec) -> Callable[[Event], Event | None] | None:
        return None if self.by is None else function_of(spec.job, "by", self.by)
