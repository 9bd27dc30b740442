"""What one micro-batch brings to a sink, or one part of a large micro-batch: for a writer that is a batch too."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa

if TYPE_CHECKING:
    from outbox.sink.records import Record, Rejection


class DeadRecord(NamedTuple):
    """A record that is no event, where it was read, and why it is none. ``event_id`` is its id if that is a UUID."""

    partition: int
    offset: int
    record: Record
    event_id: str | None
    rejection: Rejection


class Traced(NamedTuple):
    """A record of a sampled trace. ``event_id`` is None if it has no UUID as its id; ``is_dead``, if it is no event."""

    trace_id: str
    event_id: str | None
    partition: int
    offset: int
    is_dead: bool = False


class Decoded(NamedTuple):
    """Records, decoded: the rows of the events, the records that are none, and which of both are traced."""

    rows: pa.Table
    dead: Sequence[DeadRecord]
    traced: Sequence[Traced]


class Staged(NamedTuple):
    """What successful tasks have staged: their attempts, how many rows and dead records, the days of the ids."""

    attempts: Sequence[int]
    rows: int
    dead: int
    days: Collection[date]
    traced: Sequence[Traced]

    @classmethod
    def together(cls, tasks: Sequence[Staged]) -> Staged:
        """What these have staged together."""
        return cls(
            attempts=[attempt for task in tasks for attempt in task.attempts],
            rows=sum(task.rows for task in tasks),
            dead=sum(task.dead for task in tasks),
            days={day for task in tasks for day in task.days},
            traced=[one for task in tasks for one in task.traced],
        )


@dataclass(frozen=True)
class Batch:
    """The events of one range of offsets of a topic.

    ``start`` and ``end`` are by partition the first offset and the one after the last. They come from the reader, not
    from the rows: transaction markers and aborted records take offsets too. ``rows`` has the columns of the job's
    decoder, in any order; ``dead`` are the records that are no events; ``traced`` are the records, of either kind,
    whose outcome is logged. A batch that is ``staged`` has its rows and dead records in the sink's staging tables
    instead.
    """

    topic: str
    topic_id: str
    start: Mapping[int, int]
    end: Mapping[int, int]
    rows: pa.Table
    dead: Sequence[DeadRecord] = ()
    traced: Sequence[Traced] = ()
    staged: Staged | None = None

    @property
    def is_empty(self) -> bool:
        """Whether it covers no offsets at all, so that applying it would change nothing, not even a position."""
        return all(self.start.get(partition, 0) == end for partition, end in self.end.items())
