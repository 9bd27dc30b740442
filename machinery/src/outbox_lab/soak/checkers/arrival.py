"""No event is lost between the outbox and its topic. A repeat is equal to its first, and has a reason.

With exactly-once there is one reason: `outbox connect apply` has ended a hanging transaction, whose events the task
then sends again, all of them and before any other. So each of these has at most one block of repeats in a partition.
"""

from __future__ import annotations

from outbox_lab.soak.finding import Finding, findings
from outbox_lab.soak.repeats import differing, unexplained
from outbox_lab.soak.seen import Seen


def check(seen: Seen, *, may_repeat: bool) -> list[Finding]:
    """Compare the outbox with the topics. What `outbox prune` has deleted is judged by `changes`."""
    again = () if may_repeat else unexplained(seen.events, seen.firsts, lambda _: seen.released)
    return [
        *findings("an event of the outbox is on its topic", seen.source.outbox - seen.firsts.keys()),
        *findings("a repeated event is the same event", differing(seen.events, seen.firsts)),
        *findings("with exactly-once an event is on its topic once", again),
    ]
