"""From older versions of an event to the next one."""

from __future__ import annotations

from typing import Any


def placed_v1(payload: dict[str, Any]) -> dict[str, Any]:
    """Before version 2 every quantity was in pieces."""
    return {**payload, "unit": "PCE"}
