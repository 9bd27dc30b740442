"""Topics to create, and headers of records, without a client of Kafka."""

from __future__ import annotations

from typing import NamedTuple

Header = tuple[str, bytes | None]


class TopicSpec(NamedTuple):
    """A topic to create: with so many partitions and this configuration."""

    name: str
    partitions: int
    config: dict[str, str]
