"""From an older version of an event to the next one."""

from __future__ import annotations

from typing import Any


def placed_v1(payload: dict[str, Any]) -> dict[str, Any]:
    """Since version 2 the number of pieces is in the event."""
    return {**payload, "pieces": sum(line["pieces"] for line in payload["lines"])}
