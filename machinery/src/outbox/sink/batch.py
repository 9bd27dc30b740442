"""What one micro-batch brings to a sink, or one part of a large micro-batch: for a writer that is a batch too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import NamedTuple

import pyarrow as pa

from outbox.events.schema import Rejection
from outbox.sink.records import Record

Rows = Mapping[str, pa.Table]  # by the name of the event, rows with its columns


class DeadRecord(NamedTuple):
    """A record that is no event, with its place and the reason. ``event_id`` is its id if that is a UUID."""

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
    """Records, decoded: the rows of the events, the records that are no events, and which of both are traced.
    ``skipped`` counts the events that the sink has not asked for, by name.
    """

    rows: Rows
    dead: Sequence[DeadRecord]
    traced: Sequence[Traced]
    skipped: Mapping[str, int] = {}

    @classmethod
    def together(cls, parts: Sequence[Decoded]) -> Decoded:
        """What these have together."""
        tables: dict[str, list[pa.Table]] = {}
        for part in parts:
            for name, table in part.rows.items():
                tables.setdefault(name, []).append(table)
        return cls(
            rows={name: pa.concat_tables(found) for name, found in tables.items()},
            dead=[one for part in parts for one in part.dead],
            traced=[one for part in parts for one in part.traced],
            skipped=_sum(part.skipped for part in parts),
        )


class Returned(NamedTuple):
    """What a transform has returned of some events: rows with their places and its columns, or, where tasks have staged
    them, their attempts and how many rows. ``failed``: by partition and offset of an event, how the transform failed.
    """

    rows: pa.Table | None = None
    attempts: Sequence[int] = ()
    row_count: int = 0
    failed: Mapping[tuple[int, int], str] = {}


class Staged(NamedTuple):
    """What successful tasks have staged: their attempts, how many rows and dead records, the days of the ids; and how
    many events they have skipped.
    """

    attempts: Sequence[int]
    rows: int
    dead: int
    days: Collection[date]
    traced: Sequence[Traced]
    skipped: Mapping[str, int] = {}

    @classmethod
    def together(cls, tasks: Sequence[Staged]) -> Staged:
        """What these have staged together."""
        return cls(
            attempts=[attempt for task in tasks for attempt in task.attempts],
            rows=sum(task.rows for task in tasks),
            dead=sum(task.dead for task in tasks),
            days={day for task in tasks for day in task.days},
            traced=[one for task in tasks for one in task.traced],
            skipped=_sum(task.skipped for task in tasks),
        )


@dataclass(frozen=True)
class Batch:
    """The events of one range of offsets of a topic.

    ``start`` and ``end`` are by partition the first offset and the one after the last. They come from the reader, not
    from the rows: transaction markers and aborted records take offsets too. ``rows`` has the columns of each event, in
    any order; ``returned`` is what the sink's transform made of them, if it has one; ``dead`` are the records that are
    no events; ``traced`` are the records, of either kind, whose outcome is
    logged; ``skipped`` counts the events that the sink has not asked for, by name. A batch that is ``staged`` has its
    rows and dead records in the sink's staging tables instead.
    """

    topic: str
    topic_id: str
    start: Mapping[int, int]
    end: Mapping[int, int]
    rows: Rows = field(default_factory=dict)
    dead: Sequence[DeadRecord] = ()
    traced: Sequence[Traced] = ()
    skipped: Mapping[str, int] = field(default_factory=dict)
    staged: Staged | None = None
    returned: Returned | None = None

    @property
    def is_empty(self) -> bool:
        """Whether it covers no offsets at all, so that applying it would change nothing, not even a position."""
        return all(self.start.get(partition, 0) == end for partition, end in self.end.items())

    @property
    def skipped_events(self) -> Mapping[str, int]:
        """The events that the sink has not asked for: by name, how many."""
        return self.staged.skipped if self.staged else self.skipped

    @property
    def skipped_count(self) -> int:
        """How many events the sink has not asked for."""
        return sum(self.skipped_events.values())

    @property
    def count(self) -> int:
        """How many events it has, staged or not."""
        return self.staged.rows if self.staged else sum(table.num_rows for table in self.rows.values())


def event_ids(rows: Rows) -> pa.ChunkedArray:
    """The ids of all rows."""
    return pa.chunked_array([chunk for table in rows.values() for chunk in table["event_id"].chunks], pa.string())


def _sum(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    return dict(sum(map(Counter, counts), Counter[str]()))
