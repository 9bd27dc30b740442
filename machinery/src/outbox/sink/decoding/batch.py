"""What one micro-batch brings to a sink, or one part of a large micro-batch: for a writer that is a batch too.

Records become events and dead records (`Decoded`), and these a `Chunk` of what the sink's transaction takes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import NamedTuple

import pyarrow as pa

from outbox.events.schema import Rejection
from outbox.sink.decoding.binary import Encoded
from outbox.sink.decoding.records import Record

Rows = Mapping[str, pa.Table]  # by the name of the event, rows with its columns


class DeadRecord(NamedTuple):
    """A record that is no event, with its place and the reason. ``event_id`` is its id if that is a UUID."""

    partition: int
    offset: int
    record: Record
    event_id: str | None
    rejection: Rejection


class Decoded(NamedTuple):
    """Decoded records: rows of the events, and the records that are no events. ``skipped`` counts, by name, the events
    that the sink has not asked for.
    """

    rows: Rows
    dead: Sequence[DeadRecord]
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
            skipped=_sum(part.skipped for part in parts),
        )


@dataclass(frozen=True)
class Chunk:
    """Records of a topic as a sink applies them.

    ``rows`` are its ``count`` events for the table ``batch``, as bytes of COPY; ``dead`` are its ``dead_count`` records
    that are no events, for the table of those (`outbox.sink.remembering.dead_letters`). ``days`` are those of the ids,
    if the strategy needs partitions for them. ``skipped`` counts the events that the sink has not asked for, by name.

    A sink whose events Spark gets, for a transform or a lakehouse, has ``events`` in place of ``rows``: a table with
    the columns of the sink's layout.
    """

    rows: Sequence[Encoded] = ()
    count: int = 0
    dead: Sequence[Encoded] = ()
    dead_count: int = 0
    days: Collection[date] = frozenset()
    skipped: Mapping[str, int] = field(default_factory=dict)
    events: pa.Table | None = None

    @property
    def size_bytes(self) -> int:
        """How much memory it takes, nearly."""
        encoded = sum(one.size_bytes for one in (*self.rows, *self.dead))
        return encoded + (0 if self.events is None else self.events.nbytes)

    @property
    def skipped_count(self) -> int:
        """How many events the sink has not asked for."""
        return sum(self.skipped.values())

    @classmethod
    def together(cls, parts: Sequence[Chunk]) -> Chunk:
        """The records of these, which is at least one, as one."""
        if len(parts) == 1:
            return parts[0]
        events = [part.events for part in parts if part.events is not None]
        return cls(
            rows=Encoded.together(one for part in parts for one in part.rows),
            count=sum(part.count for part in parts),
            dead=Encoded.together(one for part in parts for one in part.dead),
            dead_count=sum(part.dead_count for part in parts),
            days={day for part in parts for day in part.days},
            skipped=_sum(part.skipped for part in parts),
            events=pa.concat_tables(events).combine_chunks() if events else None,
        )


class Returned(NamedTuple):
    """Rows that a transform has returned of some events, with their places and its columns. ``failed``: by partition
    and offset of an event, how the transform failed.
    """

    rows: pa.Table
    failed: Mapping[tuple[int, int], str] = {}


@dataclass(frozen=True)
class Batch:
    """The records of one range of offsets of a topic.

    ``start`` and ``end`` are by partition the first offset and the one after the last. They come from the reader, not
    from the records: transaction markers and aborted records take offsets too. ``returned`` is what the sink's
    transform made of the events, if it has one.
    """

    topic: str
    topic_id: str
    start: Mapping[int, int]
    end: Mapping[int, int]
    chunk: Chunk = field(default_factory=Chunk)
    returned: Returned | None = None

    @property
    def is_empty(self) -> bool:
        """Whether it covers no offsets at all, so that applying it would change nothing, not even a position."""
        return all(self.start.get(partition, 0) == end for partition, end in self.end.items())


def event_ids(rows: Rows) -> pa.ChunkedArray:
    """The ids of all rows."""
    return pa.chunked_array([chunk for table in rows.values() for chunk in table["event_id"].chunks], pa.string())


def _sum(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    return dict(sum(map(Counter, counts), Counter[str]()))
