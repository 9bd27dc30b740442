"""Make chunks of records: what was decoded, as bytes that the driver only has to copy.

Called in the driver for few records, and in tasks of Spark for many. It is a pure function of the records, so it does
not matter how often a task runs, and where.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from outbox.sink.decoding import binary, dead_records, ids
from outbox.sink.decoding.batch import Chunk, Decoded, Rows, event_ids
from outbox.sink.decoding.binary import Encoded
from outbox.sink.decoding.decoder import RecordDecoder
from outbox.sink.decoding.layout import Layout
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
        return Chunk(
            rows=() if self.as_frame else encoded_rows(decoded.rows, self.layout),
            count=sum(rows.num_rows for rows in decoded.rows.values()),
            dead=[dead_records.encode(decoded.dead)] if decoded.dead else (),
            dead_count=len(decoded.dead),
            days=ids.days(event_ids(decoded.rows)) if self.with_days and decoded.rows else frozenset(),
            skipped=decoded.skipped,
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


def encoded_rows(rows: Rows, layout: Layout) -> list[Encoded]:
    """The rows of each event for a table of this layout; columns that an event lacks are left out."""
    types = binary.types_of(layout.columns)
    return [binary.encode(layout.rows(event, table), types) for event, table in rows.items()]


def _last(records: Records) -> dict[int, int]:
    """By partition the last offset, as records of a partition are in their order."""
    return dict(zip(records.partitions, records.offsets, strict=True))
