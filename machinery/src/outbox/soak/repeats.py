"""Records that carry the same thing, an event or a change of a row: the first of them, and its repeats."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol, Self, TypeVar


class Record(Protocol):
    """A record on a topic."""

    @property
    def identity(self) -> str:
        """What it carries: the same in each of its records."""

    @property
    def topic(self) -> str:
        """Where it stands."""

    @property
    def partition(self) -> int:
        """Where it stands there."""

    @property
    def place(self) -> str:
        """Both, and its offset."""

    def is_same_as(self, other: Self, /) -> bool:
        """Whether both have the same content."""


R = TypeVar("R", bound=Record)


def firsts(records: Sequence[R]) -> dict[str, R]:
    """By identity, the first record of each."""
    found: dict[str, R] = {}
    for record in records:
        found.setdefault(record.identity, record)
    return found


def repeated(records: Sequence[R], first: Mapping[str, R]) -> list[R]:
    """The records that carry what another record has brought before."""
    return [record for record in records if record is not first[record.identity]]


def differing(records: Sequence[R], first: Mapping[str, R]) -> Iterator[str]:
    """The repeats that differ from the first."""
    for record in repeated(records, first):
        before = first[record.identity]
        if not record.is_same_as(before):
            yield f"{record.identity}: {before.place} and {record.place} differ"


def unexplained(records: Sequence[R], first: Mapping[str, R], released: Callable[[str], int]) -> Iterator[str]:
    """The beginnings of the blocks of repeats, of each partition that has more blocks than transactions of its topic
    were released.
    """
    for (topic, _), begun in _blocks(records, first).items():
        if len(begun) > released(topic):
            yield from (f"{record.identity} at {record.place}" for record in begun)


def _blocks(records: Sequence[R], first: Mapping[str, R]) -> Mapping[tuple[str, int], list[R]]:
    """By partition, the first record of each block.

    A block is a run of repeats with no other record between them. Their first records stand in the same order, with no
    other first record between them.
    """
    found: dict[tuple[str, int], list[R]] = {}
    numbers: dict[str, int] = {}  # by identity, the number of its first record among those of its partition
    counts: Counter[tuple[str, int]] = Counter()  # by partition, of these
    next_ones: dict[tuple[str, int], int] = {}  # by partition with an open block, the number that it goes on with
    for record in records:
        partition = record.topic, record.partition
        if record is first[record.identity]:
            numbers[record.identity] = counts[partition]
            counts[partition] += 1
            next_ones.pop(partition, None)
            continue
        number = numbers[record.identity]
        if next_ones.get(partition) != number:
            found.setdefault(partition, []).append(record)
        next_ones[partition] = number + 1
    return found
