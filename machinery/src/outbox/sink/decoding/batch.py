"""Chunks and batches: what one micro-batch, or one part of a large one, brings to a sink.

Chunking turns decoded records into bytes that the driver only has to copy. It runs in the driver for few records, and
in tasks of Spark for many. It is a pure function of the records, so it does not matter how often a task runs, or where.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import NamedTuple

from outbox.base.heavy import pa
from outbox.base.trace import SampledEvents
from outbox.sink.decoding import binary, dead_records
from outbox.sink.decoding.binary import Encoded
from outbox.sink.decoding.decoder import RecordDecoder
from outbox.sink.decoding.layout import Layout
from outbox.sink.decoding.records import Decoded, Records, event_ids, summed
from outbox.sink.decoding.values import days, types_of

Reached = dict[int, int]  # by partition, the offset behind the last record


@dataclass(frozen=True)
class Chunk:
    """Records of a topic as a sink applies them.

    ``rows`` are its ``count`` events for the table ``batch``, as bytes of COPY; ``dead`` are its ``dead_count`` records
    that are no events, for the table of those (`outbox.sink.remembering.dead_letters`). ``days`` are those of the ids,
    if the strategy needs partitions for them. ``skipped`` counts the events that the sink has not asked for, by name.
    ``sampled`` are the sampled ones of the others, if the sink's process records spans.

    A sink whose events Spark gets, for a transform or a lakehouse, has ``events`` in place of ``rows``: a table with
    the columns of the sink's layout.
    """

    rows: Sequence[Encoded] = ()
    count: int = 0
    dead: Sequence[Encoded] = ()
    dead_count: int = 0
    days: Collection[date] = frozenset()
    skipped: Mapping[str, int] = field(default_factory=dict)
    sampled: SampledEvents = field(default_factory=SampledEvents)
    events: pa.Table | None = None

    @property
    def frame(self) -> pa.Table:
        """The events, for a sink whose events Spark gets."""
        assert self.events is not None, "a chunk for Spark"  # noqa: S101
        return self.events

    @property
    def size_bytes(self) -> int:
        """Roughly the memory that the chunk takes."""
        encoded = sum(one.size_bytes for one in (*self.rows, *self.dead))
        return encoded + (0 if self.events is None else self.events.nbytes)

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
            skipped=summed(part.skipped for part in parts),
            sampled=SampledEvents.together(part.sampled for part in parts),
            events=pa.concat_tables(events).combine_chunks() if events else None,
        )


@dataclass(frozen=True)
class Chunking:
    """Makes the chunks of a sink from records of a topic. Executors receive it by pickling."""

    decoder: RecordDecoder
    layout: Layout
    as_frame: bool  # whether Spark gets the events
    with_days: bool  # whether the ids are UUIDv7s whose days are wanted

    def chunk(self, records: Records) -> Chunk:
        """The chunk of some records. Each part of them is encoded at once, while the processor's caches hold it."""
        parts = [*records.parts(self.decoder.at_once)] or [records]
        return Chunk.together([self.of_decoded(self.decoder.decode(part)) for part in parts])

    def of_decoded(self, decoded: Decoded) -> Chunk:
        """The chunk of records that are decoded. Columns that an event lacks are left out of its rows."""
        types = types_of(self.layout.columns)
        rows = {} if self.as_frame else decoded.rows
        return Chunk(
            rows=[binary.encode(self.layout.rows(event, columns), types) for event, columns in rows.items()],
            count=sum(len(columns["offset"]) for columns in decoded.rows.values()),
            dead=[dead_records.encode(decoded.dead)] if decoded.dead else (),
            dead_count=len(decoded.dead),
            days=days(event_ids(decoded.rows)) if self.with_days and decoded.rows else frozenset(),
            skipped=decoded.skipped,
            sampled=decoded.sampled,
            events=self.layout.table(decoded.rows) if self.as_frame else None,
        )

    def first(self, read: Iterable[Records], max_bytes: int) -> tuple[Chunk, Reached | None]:
        """The chunk of the first records that are read, and where it ends: None if all have been read.

        It takes some of them in any case, and ends once it has so many bytes.
        """
        chunks, size_bytes, reached = list[Chunk](), 0, Reached()
        for records in read:
            chunk = self.chunk(records)
            chunks.append(chunk)
            size_bytes += chunk.size_bytes
            reached |= {partition: offset + 1 for partition, offset in _last(records).items()}
            if size_bytes >= max_bytes:
                return Chunk.together(chunks), reached
        return Chunk.together(chunks or [self.of_decoded(Decoded({}, []))]), None


def _last(records: Records) -> dict[int, int]:
    """By partition the last offset, as records of a partition are in their order."""
    return dict(zip(records.partitions, records.offsets, strict=True))


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
    def frame(self) -> pa.Table:
        """The rows that a target elsewhere gets: what the transform has returned, or else the events."""
        return self.chunk.frame if self.returned is None else self.returned.rows

    @property
    def is_empty(self) -> bool:
        """Whether it covers no offsets at all, so that applying it would change nothing, not even a position."""
        return all(self.start.get(partition, 0) == end for partition, end in self.end.items())
