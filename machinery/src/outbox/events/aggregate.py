"""An aggregate type, as the catalog has it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from outbox.events.schema import EventSchema


@dataclass(frozen=True)
class Aggregate:
    """An aggregate type: its topic, and its events by type and version."""

    name: str
    topic: str
    key: str
    """The property, in each payload, that repeats the record's key."""
    version: str | None = None
    """The property that numbers the events of a key: 1, 2, 3 and so on."""
    partitions: int = 4
    source: str | None = None
    """A view of the source database with the state of each entity: columns key, version, and what rebuilds read."""
    published: bool = True
    """Whether readers may rely on the events. Those of a sample, or of work in progress, may still be edited."""
    events: Mapping[str, Mapping[int, EventSchema]] = field(default_factory=dict)

    @property
    def schemas(self) -> list[EventSchema]:
        """Every version of every event."""
        return [schema for versions in self.events.values() for schema in versions.values()]
