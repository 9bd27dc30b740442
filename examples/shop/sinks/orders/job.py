"""The state of each order, from its events in order."""

from __future__ import annotations

from pathlib import Path

from outbox import Settings
from outbox.sinks import PostgresTarget, SinkJob

PROJECTIONS = Path(__file__).with_name("projections")


def jobs(settings: Settings) -> list[SinkJob]:
    """The sink `orders`."""
    del settings
    return [SinkJob(name="orders", events=["order"], projections=PROJECTIONS, target=PostgresTarget())]
