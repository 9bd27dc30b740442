"""From older versions of an event to the next one."""

from __future__ import annotations

from typing import Any


def opened_v1(payload: dict[str, Any]) -> dict[str, Any]:
    """Accounts had no label before version 2."""
    return {**payload, "label": ""}
