"""The events of a key are on one partition, numbered 1, 2, 3 and so on, and stand there in this order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from outbox_lab.soak.finding import Finding, findings
from outbox_lab.soak.seen import Seen, TopicEvent


def check(seen: Seen) -> list[Finding]:
    """Look at the first of each numbered event, in the order in which they stand. `arrival` looks at the repeats."""
    by_key: dict[tuple[str, str], list[TopicEvent]] = defaultdict(list)
    for event in seen.firsts.values():
        if event.version is not None:
            by_key[event.topic, event.key].append(event)
    return [
        *findings("the events of a key are on one partition", _spread(by_key.values())),
        *findings("the versions of a key are 1, 2, 3 and so on, in this order", _gaps(by_key.values())),
    ]


def _spread(keys: Iterable[Sequence[TopicEvent]]) -> Iterator[str]:
    for events in keys:
        if len({event.partition for event in events}) > 1:
            yield events[0].key


def _gaps(keys: Iterable[Sequence[TopicEvent]]) -> Iterator[str]:
    """The first version of each key that does not go on by one."""
    for events in keys:
        for expected, event in enumerate(events, start=1):
            if event.version != expected:
                yield f"{event.key}: {event.version} instead of {expected} at {event.place}"
                break
