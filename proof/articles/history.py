"""Compare the events that were written with the records that a reader of the topic has seen."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple


class Delivery(NamedTuple):
    """Outcomes of events, in numbers."""

    written: int
    records: int
    lost: int  # written, and in no record
    duplicates: int  # records whose event another record has brought before
    unexpected: int  # records whose event was never written

    @property
    def is_complete(self) -> bool:
        """Whether every event came, and no foreign one. Without any event nothing is shown."""
        return self.written > 0 and self.lost == 0 and self.unexpected == 0

    @property
    def is_exactly_once(self) -> bool:
        """Whether every event came in exactly one record."""
        return self.is_complete and self.duplicates == 0

    def __str__(self) -> str:
        foreign = f", {self.unexpected:,} never written" if self.unexpected else ""
        return (
            f"{self.written:,} events in {self.records:,} records: "
            f"{self.lost:,} lost, {self.duplicates:,} duplicates{foreign}"
        )


def compare(written: Collection[str], read: Sequence[str]) -> Delivery:
    """Compare the ids of the written events with those of the records; a record is counted, not its offset."""
    known, seen = set(written), set(read)
    return Delivery(
        written=len(known),
        records=len(read),
        lost=len(known - seen),
        duplicates=len(read) - len(seen),
        unexpected=sum(event_id not in known for event_id in read),
    )
