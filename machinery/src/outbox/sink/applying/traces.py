"""Log what became of traced events, a line each, so that the trace id of a request leads to its events.

A line is written after the commit of what it reports. If the process ends in between, the line is missing, and the
event is logged as a duplicate when it is read again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from psycopg2 import extensions

from outbox.base import log
from outbox.sink.decoding.batch import TRACED_MAX, Traced
from outbox.sink.decoding.layout import IS_FILTERED

PLACES = 'unnest(%s::int[], %s::bigint[]) AS place (partition, "offset")'
OUTCOMES = f"""
WITH place AS (SELECT * FROM {PLACES})
SELECT new.partition, new."offset", 'applied'
  FROM pg_temp.new_events AS new
  JOIN place ON place.partition = new.partition AND place."offset" = new."offset"
UNION ALL
SELECT batch.partition, batch."offset", 'set aside'
  FROM pg_temp.outbox_batch AS batch
  JOIN pg_temp.rejections AS rejected ON rejected.event_id = batch.event_id
  JOIN place ON place.partition = batch.partition AND place."offset" = batch."offset"
"""  # noqa: S608
FILTERED = f"""
SELECT batch.partition, batch."offset"
  FROM pg_temp.outbox_batch AS batch
  JOIN {PLACES} ON place.partition = batch.partition AND place."offset" = batch."offset"
 WHERE batch."{IS_FILTERED}"
"""  # noqa: S608

Outcome = Literal["applied", "duplicate", "filtered", "set aside"]

_log = log.get(__name__)


def outcomes(
    cursor: extensions.cursor, traced: Sequence[Traced], *, has_transform: bool
) -> list[tuple[Traced, Outcome]]:
    """What becomes of these records, asked in the transaction that applies them.

    A record that is neither applied nor set aside nor filtered was known: to the strategy, or to a dead letter that
    resolved it.
    """
    if not traced:
        return []
    found: dict[tuple[int, int], Outcome] = {(one.partition, one.offset): "set aside" for one in traced if one.is_dead}
    if has_transform:
        found |= filtered(cursor, traced)
    cursor.execute(OUTCOMES, _places(traced))
    found |= {(partition, offset): outcome for partition, offset, outcome in cursor}
    return [(one, found.get((one.partition, one.offset), "duplicate")) for one in traced]


def filtered(cursor: extensions.cursor, traced: Sequence[Traced]) -> dict[tuple[int, int], Outcome]:
    """The traced records that the sink's transform leaves out of ``batch``, by partition and offset."""
    if not traced:
        return {}
    cursor.execute(FILTERED, _places(traced))
    return dict.fromkeys(cursor, "filtered")


def log_outcomes(sink: str, found: Sequence[tuple[Traced, Outcome]], count: int) -> None:
    """Log them, once that transaction is committed; of ``count``, what is more than TRACED_MAX only as a number."""
    for traced, outcome in found:
        place = {"partition": traced.partition, "offset": traced.offset}
        names = {"trace_id": traced.trace_id, "event_id": traced.event_id}
        _log.info(f"event {outcome}", sink=sink, outcome=outcome, **names, **place)
    if count > TRACED_MAX:
        _log.info("more traced events than are logged", sink=sink, left_out=count - TRACED_MAX)


def _places(traced: Sequence[Traced]) -> tuple[list[int], list[int]]:
    return [one.partition for one in traced], [one.offset for one in traced]
