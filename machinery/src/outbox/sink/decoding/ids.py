"""Ids of events, which are UUIDv7s, and the time inside."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import date, timedelta
from uuid import UUID

EPOCH = date(1970, 1, 1)
STEP_MS = 1 << 16
DIGITS_AS_0 = bytes.maketrans(b"123456789abcdef", b"0" * 15)
SHAPE, VERSION_PLACE, VARIANT_PLACE = b"00000000-0000-0000-0000-000000000000,", 14, 19


def are_v7(ids: Sequence[bytes]) -> bool:
    """Whether all are UUIDv7s in lower case. Their bytes are looked at together, which is six times as fast."""
    text = b"".join(one + b"," for one in ids)
    return (
        text.translate(DIGITS_AS_0) == SHAPE * len(ids)
        and {*text[VERSION_PLACE :: len(SHAPE)]} <= {*b"7"}
        and {*text[VARIANT_PLACE :: len(SHAPE)]} <= {*b"89ab"}
    )


def day_of(event_id: UUID) -> date:
    """The day (UTC) of the time inside a UUIDv7; the last day of the calendar for a time beyond it."""
    return _day(event_id.int >> 80)


def days(event_ids: Iterable[str]) -> set[date]:
    """The days, in UTC, of the times inside these UUIDv7s, and maybe the day before one of them."""
    # The first eight digits count in steps of 65.5 s, so that a batch has few of them, however many ids it has.
    first_ms = {int(step, 16) << 16 for step in {event_id[:8] for event_id in event_ids}}
    return {_day(ms) for start in first_ms for ms in (start, start + STEP_MS - 1)}


def made_at_ms(event_id: str) -> int:
    """The time inside a UUIDv7, in milliseconds since 1970."""
    return int(event_id[:8] + event_id[9:13], 16)


def _day(ms: int) -> date:
    return EPOCH + min(timedelta(milliseconds=ms), date.max - EPOCH)
