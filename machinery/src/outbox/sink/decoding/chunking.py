"""Make chunks of records: what was decoded, as bytes that the driver only has to copy.

Called in the driver for few records, and in tasks of Spark for many. It is a pure function of the records, so it does
not matter how often a task runs, and where.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import date

import pyarrow as pa

from outbox.sink.decoding import binary, dead_records, ids
from outbox.sink.decoding.batch import TRACED_MAX, Chunk, Decoded, Rows, Traced, event_ids
from outbox.sink.decoding.binary import Encoded
from outbox.sink.decoding.decoder import RecordDecoder
from outbox.sink.decoding.layout import EVENT_TYPE, Layout
from outbox.sink.decoding.records import Records

Reached = dict[int, int]  # by partition, the offset behind the last record


@dataclass(frozen=True)
class Chunking:
    """How the records of a topic become the chunks of a sink. Executors receive it by pickling."""

    decoder: RecordDecoder
    layout: Layout
    as_frame: bool  # whether Spark gets the events
    with_days: bool  # whether the ids are UUIDv7s whose days are wanted

    def chunk(self, records: Records) -> Chunk:
        """The chunk of some records."""
        return self.of_decoded(self.decoder.decode(records))

    def of_decoded(self, decoded: Decoded) -> Chunk:
        """The chunk of records that are decoded."""
        making = _Making(self)
        making.add(decoded)
        return making.chunk()

    def first(self, read: Iterable[Records], max_bytes: int) -> tuple[Chunk, Reached | None]:
        """The chunk of the first records that are read, and where it ends: None if all have been read.

        It takes some of them in any case, and ends once it has so many bytes.
        """
        making, reached = _Making(self), Reached()
        for records in read:
            making.add(self.decoder.decode(records))
            reached |= {partition: offset + 1 for partition, offset in _last(records).items()}
            if making.size_bytes >= max_bytes:
                return making.chunk(), reached
        return making.chunk(), None


class _Making:
    """A chunk that is being made."""

    def __init__(self, of: Chunking) -> None:
        self._of = of
        self.size_bytes = self._count = self._dead_count = self._traced_count = 0
        self._rows, self._dead, self._events = list[Encoded](), list[Encoded](), list[pa.Table]()
        self._days, self._traced, self._skipped = set[date](), list[Traced](), Counter[str]()

    def add(self, decoded: Decoded) -> None:
        """Add records that are decoded."""
        self._count += sum(rows.num_rows for rows in decoded.rows.values())
        self._dead_count += len(decoded.dead)
        self._traced_count += len(decoded.traced)
        self._traced += decoded.traced[: TRACED_MAX - len(self._traced)]
        self._skipped.update(decoded.skipped)
        if self._of.with_days and decoded.rows:
            self._days |= ids.days(event_ids(decoded.rows))
        if decoded.dead:
            self._take(self._dead, [dead_records.encode(decoded.dead)])
        if self._of.as_frame:
            events = self._of.layout.table(decoded.rows)
            self._events.append(events)
            self.size_bytes += events.nbytes
        else:
            self._take(self._rows, encoded_rows(decoded.rows, self._of.layout))

    def _take(self, into: list[Encoded], some: Collection[Encoded]) -> None:
        into += some
        self.size_bytes += sum(one.size_bytes for one in some)

    def chunk(self) -> Chunk:
        """All of it."""
        events = None
        if self._of.as_frame:
            events = pa.concat_tables(self._events or [self._of.layout.schema.empty_table()]).combine_chunks()
        return Chunk(
            rows=Encoded.together(self._rows),
            count=self._count,
            dead=Encoded.together(self._dead),
            dead_count=self._dead_count,
            days=self._days,
            traced=self._traced,
            traced_count=self._traced_count,
            skipped=dict(self._skipped),
            events=events,
        )


def encoded_rows(rows: Rows, layout: Layout) -> list[Encoded]:
    """The rows of each event for a table of this layout; columns that an event lacks are left out."""
    types: dict[str, binary.Type] = {**binary.types_of(layout.columns), EVENT_TYPE: "label"}
    return [binary.encode(layout.rows(event, table), types) for event, table in rows.items()]


def _last(records: Records) -> dict[int, int]:
    """By partition the last offset, as records of a partition are in their order."""
    return dict(zip(records.partitions, records.offsets, strict=True))
