"""What a sink has come to, as `outbox check` compares it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from decimal import Decimal


@dataclass(frozen=True)
class TargetState(ABC):
    """What a target outside the sink database holds, in one version of it."""

    positions: Mapping[str, Mapping[int, int]] = field(default_factory=dict)  # by topic and partition, the next offset
    totals: Mapping[str, Decimal] = field(default_factory=dict)  # by key
    versions: Mapping[str, int] = field(default_factory=dict)  # by key, the highest applied
    unread: str = ""  # why nothing of this is known, if it is not

    @abstractmethod
    def lacks(self, event_ids: Collection[str]) -> frozenset[str]:
        """Those of the events that the target does not hold."""
