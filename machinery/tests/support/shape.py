"""How the project under test words its event. Tests make events in neutral words: key, quantity, unit, total."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Shape:
    """The words of one project: names of properties, and values."""

    aggregatetype: str
    type_less: str  # of an event with a negative quantity
    type_more: str
    reference: str  # a uuid beside the key
    key: str
    quantity: str
    unit: str
    total_after: str
    units: tuple[str, str]

    @property
    def events(self) -> list[str]:
        """What the sinks of these events ask for."""
        return [self.aggregatetype]

    def payload(
        self,
        *,
        reference: str,
        key: str,
        quantity: object,
        version: object,
        unit: object,
        total_after: object,
        occurred_at: str,
    ) -> dict[str, Any]:
        """The value of a record."""
        return {
            self.reference: reference,
            self.key: key,
            self.quantity: quantity,
            self.unit: unit,
            self.total_after: total_after,
            "version": version,
            "occurred_at": occurred_at,
        }
