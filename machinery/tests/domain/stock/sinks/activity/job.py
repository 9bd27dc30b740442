"""Events of items and of orders in, the activity of each out: a sink of two topics."""

from __future__ import annotations

from pathlib import Path

from outbox import Settings
from outbox.sinks import PostgresTarget, SinkJob

PROJECTIONS = Path(__file__).with_name("projections")


def jobs(settings: Settings) -> list[SinkJob]:
    """The sink `activity`."""
    del settings
    return [SinkJob(name="activity", events=["item", "order"], projections=PROJECTIONS, target=PostgresTarget())]
