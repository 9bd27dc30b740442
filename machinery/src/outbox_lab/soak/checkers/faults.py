"""Every fault that began has happened, and what it broke works again. Otherwise the run says nothing."""

from __future__ import annotations

from collections.abc import Sequence

from outbox_lab.soak.finding import Finding, findings
from outbox_lab.soak.injection import Injection


def check(injections: Sequence[Injection]) -> list[Finding]:
    """A finding for the faults that did not happen, and one for those that were not healed."""
    return [
        *findings("a fault that began has happened", (str(one) for one in injections if not one.evidence)),
        *findings("a fault is healed", (str(one) for one in injections if one.evidence and _is_left_broken(one))),
    ]


def _is_left_broken(one: Injection) -> bool:
    return not one.is_healed and not one.is_broken_off


def not_happened(selected: Sequence[str], injections: Sequence[Injection]) -> list[str]:
    """The faults that were selected, and that the run had no time for."""
    happened = {one.planned.fault for one in injections if one.evidence}
    return [name for name in selected if name not in happened]
