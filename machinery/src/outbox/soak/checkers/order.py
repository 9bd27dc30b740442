"""The events of a key are on one partition, numbered 1, 2, 3 and so on, and stand there in this order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from outbox.soak.finding import Finding, findings
from outbox.soak.seen import Event, Seen


def check(seen: Seen) -> list[Finding]:
    """Look at the first of each numbered event, in the order in which they stand."""
    by_key: dict[tuple[str, str], list[Event]] = defaultdict(list)
    for event in seen.firsts.values():
        if event.version is not None:
            by_key[event.topic, event.key].append(event)
    return [
        *findings(
            "the events of a key are on one partition",
            (f"{key}" for (_, key), events in by_key.items() if len({event.partition for event in events}) > 1),
        ),
        *findings(
            "the versions of a key are 1, 2, 3 and so on, in this order",
            (f"{key}: {_first_gap(events)}" for (_, key), events in by_key.items() if _first_gap(events)),
        ),
    ]


def _first_gap(events: Sequence[Event]) -> str:
    """The first place where the versions do not go on by one; empty if there is none."""
    for expected, event in enumerate(events, start=1):
        if event.version != expected:
            return f"{event.version} instead of {expected} at {event.topic}-{event.partition}@{event.offset}"
    return ""
