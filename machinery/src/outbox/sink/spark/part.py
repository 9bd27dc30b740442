"""A range of offsets of a topic: what one task reads, or one transaction applies."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

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
        """The same as `outbox.kafka.records` wants it."""
        return {partition: (self.start[partition], self.end[partition]) for partition in self.end}

    def in_parts(self, records_max: int) -> Sequence[Part]:
        """The same in parts of about so many offsets at most; none if it has no offsets."""
        return self.divided(math.ceil(self.count / records_max)) if self.count else []

    def divided(self, count: int) -> Sequence[Part]:
        """So many parts, one after the other, each with the same share of every partition."""
        cuts = [
            {
                partition: self.start[partition] + (self.end[partition] - self.start[partition]) * number // count
                for partition in self.end
            }
            for number in range(count + 1)
        ]
        return [Part(self.topic, start, end) for start, end in pairwise(cuts)]

    def behind(self, reached: Mapping[int, int]) -> Part:
        """What is left of it when it was read up to these offsets."""
        return Part(self.topic, reached, self.end)
