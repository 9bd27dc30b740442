"""Examine whether a project's sinks can run on the declared events, for `outbox events check`, without a database.

A sink may be unable to start though each declaration is valid: an upcaster is missing, two events would have one view,
or a projection cannot be used.
"""

from __future__ import annotations

from collections.abc import Iterator

from outbox.base.errors import Failure
from outbox.base.settings import Settings
from outbox.events.catalog import Finding
from outbox.sink import discovery
from outbox.sink.spec import SinkSpec


def examine(settings: Settings) -> list[Finding]:
    """Every sink that cannot start, or whose personal data cannot be erased. Raises what a module ``job`` raises."""
    usable, failures = discovery.usable(settings)
    return [
        *(_unusable(name, failure) for name, failure in failures.items()),
        *(finding for spec in usable for finding in _unerasable(spec)),
    ]


def _unusable(name: str, failure: Failure) -> Finding:
    return Finding(failure.code, f"sink {name}", "", str(failure).removeprefix(f"sink {name}: "))


def _unerasable(spec: SinkSpec) -> Iterator[Finding]:
    """The topics whose personal data `outbox erase` could not erase."""
    for topic in () if spec.target.is_elsewhere else spec.decoders:
        try:
            spec.erase_files(topic)
        except Failure as failure:
            yield _unusable(spec.name, failure)
