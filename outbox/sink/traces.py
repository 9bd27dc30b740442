"""Tell what became of traced events: a log line each, so that who has a trace id of a request finds its events.

A line is written after the commit of what it tells. Should the process end in between, it is missing, and the event
is told as a duplicate when it is read again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from psycopg2 import extensions

from outbox.base import log
from outbox.sink.dead_letters import DeadLetter

LIMIT = 100  # of a batch: a log of every event of a backlog is no log

OUTCOMES = """
WITH place AS (SELECT * FROM unnest(%s::int[], %s::bigint[]) AS place (partition, "offset"))
SELECT partition, "offset", 'applied' FROM fresh JOIN place USING (partition, "offset")
UNION ALL
SELECT partition, "offset", 'set aside' FROM refused JOIN place USING (partition, "offset")
"""

Outcome = Literal["applied", "duplicate", "set aside"]

_log = log.get(__name__)


class Traced(NamedTuple):
    """A record of a sampled trace. ``event_id`` is None if the record has no UUID as its id."""

    trace_id: str
    event_id: str | None
    partition: int
    offset: int


def outcomes(
    cursor: extensions.cursor, traced: Sequence[Traced], dead: Sequence[DeadLetter]
) -> list[tuple[Traced, Outcome]]:
    """What becomes of these records, asked in the transaction that takes them, after strategy and projection.

    What neither was fresh nor is set aside, was known: by the strategy, or by a dead letter that has settled it.
    """
    if not traced:
        return []
    found: dict[tuple[int, int], Outcome] = {(letter.partition, letter.offset): "set aside" for letter in dead}
    cursor.execute(OUTCOMES, ([one.partition for one in traced], [one.offset for one in traced]))
    found |= {(partition, offset): outcome for partition, offset, outcome in cursor}
    return [(one, found.get((one.partition, one.offset), "duplicate")) for one in traced]


def tell(sink: str, told: Sequence[tuple[Traced, Outcome]], left_out: int) -> None:
    """Log them, once that transaction is committed."""
    for traced, outcome in told:
        _log.info(f"event {outcome}", sink=sink, outcome=outcome, **traced._asdict())
    if left_out:
        _log.info("more traced events than are told", sink=sink, left_out=left_out)
