"""The parcels of each depot, from the events of depots."""

from __future__ import annotations

from pathlib import Path

from outbox import Settings
from outbox.sinks import PostgresTarget, SinkJob

PROJECTIONS = Path(__file__).with_name("projections")


def jobs(settings: Settings) -> list[SinkJob]:
    """The sink `depots`."""
    del settings
    return [SinkJob(name="depots", events=["depot"], projections=PROJECTIONS, target=PostgresTarget())]
