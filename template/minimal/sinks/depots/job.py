"""The parcels of each depot, from the events of depots."""

from __future__ import annotations

from pathlib import Path

from outbox.base.settings import Settings
from outbox.sink.postgres.target import PostgresTarget
from outbox.sink.spec import SinkJob

PROJECTIONS = Path(__file__).with_name("projections")


def jobs(settings: Settings) -> list[SinkJob]:
    """The sink `depots`."""
    del settings
    return [SinkJob(name="depots", events=["depot"], projections=PROJECTIONS, target=PostgresTarget())]
