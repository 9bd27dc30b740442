"""Events, validated as `append` validates them, without a database."""

from __future__ import annotations

from outbox.writing.event import Event
from outbox.writing.rows import rows


def check_events(*events: Event) -> None:
    """Raises Failure for the first event that `append` would refuse, with the same code."""
    rows(events)
