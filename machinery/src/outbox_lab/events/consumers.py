"""The sinks of a project by the events that they take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from outbox.base.errors import Failure
from outbox.base.settings import Settings
from outbox.events.catalog import Catalog

if TYPE_CHECKING:
    from outbox.sink.spec import SinkJob


class Consumers(NamedTuple):
    """The jobs of a project, those of each version of an event by its name, and why others are not known."""

    jobs: Sequence[SinkJob]
    by_version: Mapping[str, Sequence[SinkJob]]
    notes: Sequence[str]


def of_project(settings: Settings, known: Catalog) -> Consumers:
    """The sinks of the project; without jobs, and with a note, where they cannot be loaded."""
    try:
        from outbox.sink import discovery

        jobs = discovery.jobs(settings)
    except Exception as error:  # the project's own code, or a library that is not installed beside the service
        return Consumers([], {}, [f"the sinks cannot be loaded: {line(error)}"])
    by_version: dict[str, list[SinkJob]] = {}
    notes = []
    for job in jobs:
        try:
            wanted = known.wanted(job.events)
        except Failure as failure:
            notes.append(f"sink {job.name}: {failure}")
            continue
        for schema in [schema for one in wanted for schema, _ in one.accepts.values()]:
            by_version.setdefault(schema.name, []).append(job)
    return Consumers(jobs, by_version, notes)


def line(error: Exception) -> str:
    """An error as one line."""
    text = str(error) if isinstance(error, Failure) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())
