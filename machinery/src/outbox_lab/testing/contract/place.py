"""The place that a target's function writes to: read by ``totals``, and emptied by ``erase``, key by key.

So a test never removes more than it has delivered. A place that is not empty at the start fails the test.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import pyarrow as pa

from outbox.base.settings import Settings
from outbox.sink.applying.function import FunctionTarget
from outbox.sink.spec import SinkSpec
from outbox_lab.testing.contract import result
from outbox_lab.testing.contract.result import Result

FUNCTIONS = ("totals", "erase")


class ProcessEnds(Exception):
    """Ends a batch where a process would end."""


@dataclass(frozen=True)
class EndingTarget(FunctionTarget):
    """Lets the function write all events of a batch, or only the first half, and then ends the process."""

    writes_half: bool = False
    written: list[pa.Table] = field(default_factory=list)

    def write(self, spec: SinkSpec, events: pa.Table) -> dict[str, str]:
        some = events.slice(0, (events.num_rows + 1) // 2) if self.writes_half else events
        super().write(spec, some)
        self.written.append(some)
        raise ProcessEnds


class FunctionPlace:
    """The place of a sink's function."""

    def __init__(self, settings: Settings, spec: SinkSpec, target: FunctionTarget) -> None:
        self._settings, self._spec, self._target = settings, spec, target

    def empty(self, delivered: Collection[tuple[str, str]]) -> None:
        """Erase these keys, each with its topic. Raises AssertionError if there is anything else."""
        for topic, key in delivered:
            self._target.erase(self._settings, self._spec, topic, key, dry_run=False)
        for key, *_ in self._target.totals(self._spec):
            raise AssertionError(
                f"sink {self._spec.name}: the place of {self._target.name} is not empty, it has the key {key}\n"
                "Usually: the test needs a place of its own; or the function erase leaves rows of a key."
            )

    def read(self) -> Result:
        """The totals by key."""
        found: dict[result.Place, dict[str, Any]] = {}
        for key, total, version in self._target.totals(self._spec):
            row = found.setdefault(
                result.Place(f"totals of {self._target.name}", f"key {key}"), {"total": Decimal(0), "version": None}
            )
            row["total"] += total
            row["version"] = version if row["version"] is None else max(version, row["version"])
        return found
