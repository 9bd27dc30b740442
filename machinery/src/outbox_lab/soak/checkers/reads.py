"""Every read returned the truth: the domain compares it with the events and with the changes acknowledged before it."""

from __future__ import annotations

from outbox_lab.soak.domain import Domain, contradictions_of
from outbox_lab.soak.finding import Finding, findings
from outbox_lab.soak.history import History
from outbox_lab.soak.seen import Seen


def check(domain: Domain, history: History, seen: Seen) -> list[Finding]:
    """A finding of the reads that are wrong; an empty list if the domain does not judge reads."""
    contradictions = contradictions_of(domain)
    return findings("a read returns the truth", contradictions(history, seen.firsts) if contradictions else ())
