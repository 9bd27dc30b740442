"""Events of items and of orders in, the activity of each out: a sink of two topics."""

from __future__ import annotations

from pathlib import Path

from outbox.base.settings import Settings
from outbox.sink.postgres.target import PostgresTarget
from outbox.sink.spec import SinkJob

PROJECTIONS = Path(__file__).with_name("projections")


def jobs(settings: Settings) -> list[SinkJob]:
    """The sink `activity`."""
    del settings
    return [SinkJob(name="activity", events=["item", "order"], projections=PROJECTIONS, target=PostgresTarget())]
