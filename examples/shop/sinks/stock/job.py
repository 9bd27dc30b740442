"""The pieces of each product, from the movements of the stock."""

from __future__ import annotations

from pathlib import Path

from outbox import Settings
from outbox.sinks import PostgresTarget, SinkJob

PROJECTIONS = Path(__file__).with_name("projections")


def jobs(settings: Settings) -> list[SinkJob]:
    """The sink `stock`."""
    del settings
    return [SinkJob(name="stock", events=["stock"], projections=PROJECTIONS, target=PostgresTarget())]
