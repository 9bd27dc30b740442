"""No process ends unless a fault ends it, or breaks a part without which it cannot work.

Otherwise whoever starts processes again, as the keeper does, hides a crash.
"""

from __future__ import annotations

from collections.abc import Sequence

from outbox.soak.death import Death
from outbox.soak.finding import Finding, findings
from outbox.soak.injection import Injection

GRACE_S = 60.0  # after a fault: a process may notice late, and needs time to end
# By part: those whose faults may end it. A process of sinks ends when Spark's batch fails.
EXCUSES = {
    "postgres": {"postgres"},
    "kafka": {"kafka"},
    "connect": {"connect", "kafka", "connect-kafka"},
    "connector": {"connector", "connect", "kafka", "postgres", "connect-kafka", "debezium-postgres"},
    "service": {"service", "service-postgres"},
    "sinks": {"sinks", "kafka", "postgres", "sinks-kafka", "sinks-postgres"},
    "spark-master": {"cluster"},
    "spark-worker": {"cluster"},
}


def check(deaths: Sequence[Death], injections: Sequence[Injection]) -> list[Finding]:
    """A finding of the deaths that no fault explains."""
    unexplained = (one for one in deaths if not any(_explains(fault, one) for fault in injections))
    return findings(
        "a process ends only by a fault",
        (f"{one.process} at {one.at_s:.0f} s: {one.last_line}" for one in unexplained),
    )


def _explains(fault: Injection, death: Death) -> bool:
    began_s, ended_s = fault.fired_s, fault.healed_s + GRACE_S
    return began_s <= death.at_s <= ended_s and not EXCUSES[death.part].isdisjoint(fault.parts)
