"""The sinks of a project: which of the declared events each takes, and whether it can run on them.

A sink may be unable to start though each declaration is valid: an upcaster is missing, two events would have one view,
or a projection cannot be used. Nothing here needs a database.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from outbox.base.errors import Failure
from outbox.base.settings import Settings
from outbox.events.catalog import Catalog
from outbox_lab.events import Finding


class Consumers(NamedTuple):
    """The names of the sinks that take each version of an event, and why others are not known."""

    by_version: Mapping[str, Sequence[str]]
    notes: Sequence[str]


def of_project(settings: Settings, known: Catalog) -> Consumers:
    """The sinks of the project; none, and a note, where they cannot be loaded."""
    try:
        from outbox.sink import discovery

        jobs = discovery.jobs(settings)
    except Exception as error:  # the project's own code, or a library that is not installed beside the service
        return Consumers({}, [f"the sinks cannot be loaded: {_line(error)}"])
    by_version: dict[str, list[str]] = {}
    notes = []
    for job in jobs:
        try:
            wanted = known.wanted(job.events)
        except Failure as failure:
            notes.append(f"sink {job.name}: {failure}")
            continue
        for schema in [schema for one in wanted for schema, _ in one.accepts.values()]:
            by_version.setdefault(schema.name, []).append(job.name)
    return Consumers(by_version, notes)


def examine(settings: Settings) -> tuple[list[Finding], str]:
    """Every sink that cannot start, or whose personal data cannot be erased; or why no sink is examined."""
    try:
        from outbox.sink import discovery
    except ImportError as error:  # beside a service, the libraries of sinks may not be installed
        return [], f"the sinks are not checked: {_line(error)}"
    try:
        usable, failures = discovery.usable(settings)
    except Failure as failure:
        if failure.code == "sinks-package-missing":
            return [], f"no sinks are checked: {_line(failure)}"
        return [Finding(failure.code, "sinks", "", _line(failure))], ""
    except Exception as error:  # the project's own code
        return [Finding("sinks-unusable", "sinks", "", f"the sinks cannot be loaded: {_line(error)}")], ""
    found = [_unusable(name, failure) for name, failure in failures.items()]
    for spec in usable:
        for topic in () if spec.target.is_elsewhere else spec.decoders:
            try:
                spec.erase_files(topic)
            except Failure as failure:
                found.append(_unusable(spec.name, failure))
    return found, ""


def _unusable(name: str, failure: Failure) -> Finding:
    return Finding(failure.code, f"sink {name}", "", str(failure).removeprefix(f"sink {name}: "))


def _line(error: Exception) -> str:
    text = str(error) if isinstance(error, Failure) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())
