"""The end of a process, as the keeper sees it: asked for by a fault, or not."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Death:
    """A process that has ended, or a connector whose task has failed. Times are seconds since the faults began."""

    process: str
    at_s: float  # when that was seen
    last_line: str = ""  # of its log
    # When it was last seen alive, which may be long before: nobody looks at connectors while a fault breaks Connect.
    alive_s: float | None = None

    @property
    def part(self) -> str:
        """The part of the testbed that it belongs to: `sinks` of `sinks-1`."""
        name, _, number = self.process.rpartition("-")
        return name if number.isdigit() else self.process
