"""The invariants of the domain hold in the source, such as that no money is made or lost."""

from __future__ import annotations

from outbox_lab.soak.finding import Finding, findings
from outbox_lab.soak.seen import Source


def check(source: Source) -> list[Finding]:
    """A finding for each invariant that some row violates."""
    return [one for name, rows in source.violations.items() for one in findings(name, rows)]
