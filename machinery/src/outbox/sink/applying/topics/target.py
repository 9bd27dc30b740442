"""The target in a Kafka topic: each new event is a record there, in a transaction with the offsets of its batch."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
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
    with another key, type or payload, or None for none. Its id is always that of the event that it was given.
    """

    topic: str
    by: str | None = None

    @property
    def topics(self) -> list[str]:
        return [self.topic]

    def require_usable(self, spec: SinkSpec) -> None:
        if self.topic in spec.topics:
            raise unusable(spec.job, f"it writes to a topic that it reads, {self.topic}", "name another topic")
        if not spec.job.events:
            raise unusable(spec.job, "a topic takes declared events only", 'name them: events=["order.placed"]')
        if files := sorted(spec.job.projections.glob("*.sql")):
            raise unusable(spec.job, f"it has a topic and a projection, {files[0]}", "delete the file, or the target")
        self._load(spec)

    def require_rebuildable(self, spec: SinkSpec) -> None:
        raise Failure(
            f"sink {spec.name} writes to topic {self.topic}, where nothing is computed again or taken back",
            f"another sink with another topic reads everything again; `outbox rewind {spec.name} --to-earliest` writes "
            "only what it has never written",
            code="rebuild-unsupported",
        )

    def writer(
        self, settings: Settings, connection: extensions.connection, spec: SinkSpec, fetch: Fetch
    ) -> TopicWriter:
        from outbox.sink.applying.topics.writer import TopicWriter

        self.require_usable(spec)
        return TopicWriter(settings, connection, spec, fetch, self._load(spec))

    def applier(self, settings: Settings, spec: SinkSpec, transform: Transformed | None = None) -> TopicApplier:
        from outbox.sink.applying.topics.writer import applier

        self.require_usable(spec)
        return applier(settings, spec, self._load(spec), transform)

    def state(self, settings: Settings, spec: SinkSpec) -> TargetState:
        from outbox.sink.applying.topics.written import state

        return state(settings, spec.name, self.topic)

    def _load(self, spec: SinkSpec) -> Function | None:
        """The function that events pass, if there is one. Raises Failure if it cannot be used."""
        if self.by is None:
            return None
        module, _, name = self.by.partition(":")
        try:
            found: Function = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise unusable(spec.job, f"by={self.by!r}: {error}", "write it as by='package.module:function'") from error
        if not callable(found):
            raise unusable(spec.job, f"by={self.by!r} is no function", "write it as by='package.module:function'")
        return found
