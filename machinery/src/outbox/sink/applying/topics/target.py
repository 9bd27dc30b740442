"""The target in a Kafka topic: each new event is a record there, in one transaction with the offsets of its batch."""

from __future__ import annotations

from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from outbox.base.errors import Failure
from outbox.base.settings import Settings
from outbox.sink.spec import SinkSpec, Target, TargetState, Transformed, unusable

if TYPE_CHECKING:
    from psycopg2 import extensions

    from outbox.sink.applying.topics.writer import Function, TopicApplier, TopicWriter
    from outbox.sink.decoding.records import Fetch


@dataclass(frozen=True)
class TopicTarget(Target):
    """A topic. ``by`` names a function, as ``module:function``, that gets each event and returns the event to write:
    with another key, type or payload, or None for none. The record has the id of the event that the function got.
    """

    topic: str
    by: str | None = None

    @property
    def topics(self) -> list[str]:
        return [self.topic]

    def require_usable(self, spec: SinkSpec) -> None:
        self._function(spec)
        if self.topic in spec.topics:
            raise unusable(spec.job, f"it writes to a topic that it reads, {self.topic}", "name another topic")
        if not spec.job.events:
            raise unusable(spec.job, "a topic takes declared events only", 'name them: events=["order.placed"]')
        if files := sorted(spec.job.projections.glob("*.sql")):
            raise unusable(spec.job, f"it has a topic and a projection, {files[0]}", "delete the file, or the target")

    def require_rebuildable(self, spec: SinkSpec, source: str) -> None:
        del source
        raise Failure(
            f"sink {spec.name} writes to topic {self.topic}, which takes nothing back",
            "a sink of another name, with another topic, begins anew",
            code="rebuild-unsupported",
        )

    def writer(
        self, settings: Settings, connection: extensions.connection, spec: SinkSpec, fetch: Fetch
    ) -> TopicWriter:
        from outbox.sink.applying.topics.writer import TopicWriter

        self.require_usable(spec)
        return TopicWriter(settings, connection, spec, fetch, self._function(spec))

    def applier(self, settings: Settings, spec: SinkSpec, transform: Transformed | None = None) -> TopicApplier:
        from outbox.sink.applying.topics.writer import applier

        return applier(settings, spec, self._function(spec), transform)

    def state(self, settings: Settings, spec: SinkSpec) -> TargetState:
        from outbox.sink.applying.topics.written import state

        return state(settings, spec.name, self.topic)

    def _function(self, spec: SinkSpec) -> Function | None:
        try:
            found: Function | None = None if self.by is None else resolve_name(self.by)
            if callable(found) or self.by is None:
                return found
            problem: object = "it is no function"
        except (ImportError, AttributeError, ValueError) as error:
            problem = error
        raise unusable(spec.job, f"by={self.by!r}: {problem}", "write it as by='package.module:function'")
