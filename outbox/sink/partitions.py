"""The partitions of processed_events that a batch needs, made before the transaction that applies it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import date, timedelta

import pyarrow as pa
import pyarrow.compute as pc
from psycopg2 import extensions

EPOCH = date(1970, 1, 1)
STEP_MS = 1 << 16
DAYS_PER_CALL = 50  # what one transaction makes at the most: each partition costs locks


def days(event_ids: pa.ChunkedArray) -> list[date]:
    """The days, in UTC, of the times inside these UUIDv7s, and maybe the day before one of them."""
    # The first eight digits count in steps of 65.5 s, so that a batch has few of them, however many ids it has.
    steps = pc.unique(pc.utf8_slice_codeunits(event_ids, 0, 8)).to_pylist()
    first_ms = {int(step, 16) << 16 for step in steps}
    return sorted({EPOCH + timedelta(milliseconds=ms) for start in first_ms for ms in (start, start + STEP_MS - 1)})


def ensure(connection: extensions.connection, wanted: Sequence[date]) -> None:
    """Make the partitions that these days lack, in transactions of a bounded number each."""
    for chunk in _chunks(wanted):
        with connection, connection.cursor() as cursor:
            cursor.execute("SELECT ensure_processed_events(%s)", [chunk])


def _chunks(wanted: Sequence[date]) -> Iterable[list[date]]:
    return ([*wanted[start : start + DAYS_PER_CALL]] for start in range(0, len(wanted), DAYS_PER_CALL))
