"""A range of offsets of a topic: what one task reads, or one transaction applies."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outbox.kafka.records import Within


@dataclass(frozen=True)
class Part:
    """A range of offsets of a topic: by partition the first one, and the one after the last."""

    topic: str
    start: Mapping[int, int]
    end: Mapping[int, int]

    @property
    def count(self) -> int:
        """How many offsets it has; markers and aborted records take some."""
        return sum(self.end[partition] - self.start[partition] for partition in self.end)

    @property
    def within(self) -> Within:
        """The range as `outbox.kafka.records` wants it."""
        return {partition: (self.start[partition], self.end[partition]) for partition in self.end}

    def in_parts(self, records_max: int) -> Sequence[Part]:
        """Parts of at most so many offsets, one after the other; none if it has no offsets."""
        return self.divided(math.ceil(self.count / records_max)) if self.count else []

    def divided(self, count: int) -> Sequence[Part]:
        """So many parts, one after the other: their sizes differ by one offset at most, and each has about the same
        share of every partition.
        """
        parts, rest = list[Part](), self
        for left in range(count, 0, -1):
            first = rest.first(math.ceil(rest.count / left))
            parts.append(first)
            rest = rest.behind(first.end)
        return parts

    def first(self, count: int) -> Part:
        """The first so many offsets. What the shares of partitions lack after rounding, one each of some makes up."""
        cut, lacking = dict(self.start), count
        rounded = list[int]()  # the partitions whose share is more than what they have got
        for partition, end in self.end.items():
            share, rest = divmod((end - self.start[partition]) * count, self.count or 1)
            cut[partition] += share
            lacking -= share
            if rest:
                rounded.append(partition)
        for partition in rounded[:lacking]:
            cut[partition] += 1
        return Part(self.topic, self.start, cut)

    def behind(self, reached: Mapping[int, int]) -> Part:
        """The rest of the part once it was read up to these offsets."""
        return Part(self.topic, reached, self.end)
