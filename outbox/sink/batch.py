"""What one micro-batch brings to the database."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from outbox.sink.dead_letters import DeadLetter
from outbox.sink.traces import Traced


@dataclass(frozen=True)
class Batch:
    """The events of one range of offsets of a topic.

    ``start`` and ``end`` are by partition the first offset and the one after the last. They come from the reader, not
    from the rows: transaction markers and aborted records take offsets too. ``rows`` has the columns of the staged
    table, in any order; ``dead`` is what could not be decoded. ``traced`` are those records, of either, whose way is to
    be told, and ``traced_left_out`` says how many more there were.
    """

    topic: str
    topic_id: str
    start: Mapping[int, int]
    end: Mapping[int, int]
    rows: pa.Table
    dead: Sequence[DeadLetter] = ()
    traced: Sequence[Traced] = ()
    traced_left_out: int = 0

    @property
    def is_empty(self) -> bool:
        """Whether it covers no offsets at all, so that applying it would change nothing, not even a position."""
        return all(self.start.get(partition, 0) == end for partition, end in self.end.items())
