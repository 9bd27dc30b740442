"""What clients have read is true: as the domain judges it."""

from __future__ import annotations

from outbox.soak.domain import Domain, Reader
from outbox.soak.finding import Finding, findings
from outbox.soak.history import History
from outbox.soak.seen import Seen


def check(domain: Domain, history: History, seen: Seen) -> list[Finding]:
    """A finding of the reads that the events contradict; none if the domain does not judge reads."""
    if not isinstance(domain, Reader):
        return []
    return findings("what was read is true", domain.contradictions(history, seen.firsts))
