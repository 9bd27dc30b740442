"""`outbox events`: the declared events are listed, checked, and shown to others."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Finding:
    """A problem in a file of the declared events. ``rule`` is a stable word; the wording of ``message`` may change."""

    rule: str
    file: str
    """The file in the folder of events, such as ``order/placed.v1.schema.json``."""
    property: str
    """The property's path, such as ``lines[].product``; empty if the problem is not in one property."""
    message: str

    def __str__(self) -> str:
        return f"{self.file}: {f'{self.property}: ' if self.property else ''}{self.message} [{self.rule}]"

    def as_dict(self) -> dict[str, str]:
        """The finding for a script."""
        return asdict(self)
