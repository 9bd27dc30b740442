"""No event is lost between the outbox and its topic; and without a fault that repeats events, none comes twice."""

from __future__ import annotations

from outbox.soak.finding import Finding, findings
from outbox.soak.seen import Event, Seen


def check(seen: Seen, *, may_repeat: bool) -> list[Finding]:
    """Compare the outbox with the topics. What `outbox prune` has deleted is judged by `changes`."""
    repeated = () if may_repeat or seen.released else (event.id for event in repeats(seen))
    return [
        *findings("an event of the outbox is on its topic", seen.source.outbox - seen.firsts.keys()),
        *findings("with exactly-once an event is on its topic once", repeated),
    ]


def repeats(seen: Seen) -> list[Event]:
    """The records that carry an event which another record has brought before."""
    return [event for event in seen.events if event is not seen.firsts[event.id]]
