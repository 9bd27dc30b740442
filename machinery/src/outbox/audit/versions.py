"""The versions of the events of a key: 1, 2, 3 and so on, each once.

Three sums per key say whether all versions from the lowest to the highest are there once. (Several missing and repeated
versions may have the same sums, but only in patterns of at least eight versions that no fault makes.) The versions of
the other keys are counted one by one, in memory that does not grow with their number.
"""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

from outbox.audit import buckets
from outbox.audit.buckets import Buckets

DIGEST_BYTES = 16


@dataclass(slots=True)
class Versions:
    """The versions of one key, as sums."""

    lowest: int
    highest: int
    count: int = 0
    total: int = 0
    squares: int = 0

    @classmethod
    def complete(cls, lowest: int, highest: int) -> Versions:
        """Each of these versions once."""
        return cls(
            lowest,
            highest,
            highest - lowest + 1,
            _sum(highest) - _sum(lowest - 1),
            _sum_of_squares(highest) - _sum_of_squares(lowest - 1),
        )

    def add(self, version: int) -> None:
        """Count an event."""
        self.lowest, self.highest = min(self.lowest, version), max(self.highest, version)
        self.count += 1
        self.total += version
        self.squares += version * version

    @property
    def is_complete(self) -> bool:
        """Whether no version is missing or repeated."""
        return self == Versions.complete(self.lowest, self.highest)


def add(versions: dict[str, Versions], key: str, version: int | None) -> None:
    """Count an event among the versions of its key; one without a version counts in none."""
    if version is not None:
        versions.setdefault(key, Versions(version, version)).add(version)


class Numbered(NamedTuple):
    """An event with its version."""

    topic: int
    key: str
    version: int
    event_id: bytes


class Repeated(NamedTuple):
    """Different events with one version of a key."""

    topic: int
    key: str
    version: int
    event_ids: list[bytes]

    def __str__(self) -> str:
        first, second, *_ = (uuid.UUID(bytes=event_id) for event_id in sorted(self.event_ids))
        return f"key {self.key}, version {self.version}: {first} and {second}"


class Counted:
    """Counts versions of keys one by one."""

    def __init__(self, salt: bytes) -> None:
        self._rows = Buckets(Numbered, salt)

    def close(self) -> None:
        """Delete the files."""
        self._rows.close()

    def add(self, event: Numbered) -> None:
        """Count an event, each once."""
        place = f"{event.topic} {event.version} {event.key}".encode()
        self._rows.add(blake2b(place, digest_size=DIGEST_BYTES).digest(), event)

    def all(self) -> Iterator[Repeated]:
        """Each version of each key, with its events: mostly one."""
        for bucket in range(buckets.COUNT):
            found: dict[tuple[int, str, int], list[bytes]] = defaultdict(list)
            for _, event in self._rows.rows(bucket):
                found[event[:3]].append(event.event_id)
            for place, event_ids in found.items():
                yield Repeated(*place, event_ids)


def _sum(last: int) -> int:
    """1 + 2 + … + last."""
    return last * (last + 1) // 2


def _sum_of_squares(last: int) -> int:
    return last * (last + 1) * (2 * last + 1) // 6
