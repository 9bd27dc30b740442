"""The time inside an id of an event, which is a UUIDv7."""

from __future__ import annotations

from datetime import date, timedelta
from uuid import UUID

from outbox.base.heavy import pa, pc

EPOCH = date(1970, 1, 1)
STEP_MS = 1 << 16


def day_of(event_id: UUID) -> date:
    """The day (UTC) of the time inside a UUIDv7; the last day of the calendar for a time beyond it."""
    return _day(event_id.int >> 80)


def days(event_ids: pa.ChunkedArray) -> set[date]:
    """The days, in UTC, of the times inside these UUIDv7s, and maybe the day before one of them."""
    # The first eight digits count in steps of 65.5 s, so that a batch has few of them, however many ids it has.
    steps = pc.unique(pc.utf8_slice_codeunits(event_ids, 0, 8)).to_pylist()
    first_ms = {int(step, 16) << 16 for step in steps}
    return {_day(ms) for start in first_ms for ms in (start, start + STEP_MS - 1)}


def made_at_ms(event_id: str) -> int:
    """The time inside a UUIDv7, in milliseconds since 1970."""
    return int(event_id[:8] + event_id[9:13], 16)


def _day(ms: int) -> date:
    return EPOCH + min(timedelta(milliseconds=ms), date.max - EPOCH)
