"""No process ends unless a fault ends it, or breaks a part without which it cannot work.

Otherwise a part that restarts processes, such as the keeper, would hide a crash.
"""

from __future__ import annotations

from collections.abc import Sequence

from outbox_lab.soak.death import Death
from outbox_lab.soak.finding import Finding, findings
from outbox_lab.soak.injection import Injection

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


def check(deaths: Sequence[Death], injections: Sequence[Injection], timeout_scale: float = 1.0) -> list[Finding]:
    """A finding of the deaths that no fault explains."""
    grace_s = GRACE_S * timeout_scale
    unexplained = (one for one in deaths if not any(_explains(fault, one, grace_s) for fault in injections))
    return findings(
        "a process ends only by a fault",
        (f"{one.process} at {one.at_s:.0f} s: {one.last_line}" for one in unexplained),
    )


def _explains(fault: Injection, death: Death, grace_s: float) -> bool:
    """Whether a fault of what it needs lasts, or has just ended, at some time at which the process may have ended."""
    alive_s = death.at_s if death.alive_s is None else death.alive_s
    is_then = fault.fired_s <= death.at_s and alive_s <= fault.healed_s + grace_s
    broken = set(fault.parts)
    if fault.victims and death.process not in fault.victims:
        broken.discard(death.part)  # it was a fault of another process
    return is_then and not EXCUSES[death.part].isdisjoint(broken)
