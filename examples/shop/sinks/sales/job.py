"""What was ordered and cancelled each day: a history, which no table of the service has."""

from __future__ import annotations

from pathlib import Path

from outbox import Settings
from outbox.sinks import PostgresTarget, SinkJob

PROJECTIONS = Path(__file__).with_name("projections")


def jobs(settings: Settings) -> list[SinkJob]:
    """The sink `sales`."""
    del settings
    return [SinkJob(name="sales", events=["order"], projections=PROJECTIONS, target=PostgresTarget())]
