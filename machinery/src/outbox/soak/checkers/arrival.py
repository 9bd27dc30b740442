"""No event is lost between the outbox and its topic. A repeat is equal to its first, and has a reason.

With exactly-once there is one reason: `outbox connect apply` has ended a hanging transaction, whose events the task
then sends again, all of them and before any other. So each of these has at most one block of repeats in a partition.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from outbox.soak.finding import Finding, findings
from outbox.soak.seen import Event, RowChange, Seen

R = TypeVar("R", Event, RowChange)


def check(seen: Seen, *, may_repeat: bool) -> list[Finding]:
    """Compare the outbox with the topics. What `outbox prune` has deleted is judged by `changes`."""
    return [
        *findings("an event of the outbox is on its topic", seen.source.outbox - seen.firsts.keys()),
        *findings("a repeated event is the same event", _changed(seen)),
        *findings("with exactly-once an event is on its topic once", () if may_repeat else _unexplained(seen)),
    ]


def repeats(seen: Seen) -> list[Event]:
    """The records that carry an event which another record has brought before."""
    return [event for event in seen.events if event is not seen.firsts[event.id]]


def _changed(seen: Seen) -> Iterator[str]:
    for event in repeats(seen):
        first = seen.firsts[event.id]
        if not event.is_same_as(first):
            yield f"{event.id}: {first.place} and {event.place} differ"


def _unexplained(seen: Seen) -> Iterator[str]:
    """The beginnings of the blocks, of each partition that has more blocks than transactions were released."""
    for begun in blocks(seen.events, seen.firsts).values():
        if len(begun) > seen.released:
            yield from (f"{event.id} at {event.place}" for event in begun)


def blocks(records: Sequence[R], firsts: Mapping[str, R]) -> Mapping[tuple[str, int], list[R]]:
    """By partition, the first record of each block: of repeats behind each other, without a new one between them."""
    found: dict[tuple[str, int], list[R]] = {}
    is_open: dict[tuple[str, int], bool] = {}
    for record in records:
        partition = record.topic, record.partition
        is_repeat = record is not firsts[record.identity]
        if is_repeat and not is_open.get(partition):
            found.setdefault(partition, []).append(record)
        is_open[partition] = is_repeat
    return found
