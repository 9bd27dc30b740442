"""Records that carry the same thing, an event or a change of a row: the first of them, and its repeats."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from outbox_lab.soak.seen import R


def differing(records: Sequence[R], first: Mapping[str, R]) -> Iterator[str]:
    """The repeats that differ from the first in more than the offset."""
    for record in records:
        before = first[record.identity]
        if record is not before and replace(record, offset=before.offset) != before:
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
