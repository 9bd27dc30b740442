"""The partitions of processed_events: which ones a batch needs, made before the transaction that applies the batch."""

from __future__ import annotations

from collections.abc import Collection
from datetime import date, timedelta
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc
from psycopg2 import extensions

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


def ensure(connection: extensions.connection, wanted: Collection[date]) -> None:
    """Make the partitions that events of these days need and that do not exist; days below the horizon need none.

    It commits its own transactions, so call it before the one that applies. Each makes at most 50 partitions, which
    takes some 400 locks. The days near today get a partition each and older ones a partition per month, so that a batch
    with ids of fifty years needs some 700 partitions. Inserting takes two locks per partition; a default Postgres has
    room for 6,400 (max_locks_per_transaction 64, max_connections 100).

    A partition is only dropped when the horizon is at or above its end. So if one of these is gone when the batch is
    applied, its events are below the horizon, where the strategy sets them aside.
    """
    is_complete = not wanted
    while not is_complete:
        with connection, connection.cursor() as cursor:
            cursor.execute("SELECT public.ensure_processed_events(%s::date[])", [sorted(wanted)])
            ((is_complete,),) = cursor.fetchall()


def _day(ms: int) -> date:
    return EPOCH + min(timedelta(milliseconds=ms), date.max - EPOCH)
