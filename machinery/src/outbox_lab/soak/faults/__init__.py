"""The faults, a module for each hop. `every` has them all by name."""

from __future__ import annotations

from collections.abc import Mapping

from outbox_lab.soak.fault import Make
from outbox_lab.soak.faults import (
    commands,
    disks,
    executors,
    links,
    merges,
    records,
    relay,
    retention,
    rollout,
    servers,
    service,
    sinks,
)


def every() -> Mapping[str, Make]:
    """By name, how to make each fault."""
    makes: list[Make] = [
        *servers.FAULTS,
        *disks.FAULTS,
        *relay.FAULTS,
        *service.FAULTS,
        *sinks.FAULTS,
        *executors.FAULTS,
        *merges.FAULTS,
        *links.FAULTS,
        *commands.FAULTS,
        *retention.FAULTS,
        *rollout.FAULTS,
        *records.FAULTS,
    ]
    return {make().name: make for make in makes}
