"""How many copies of each book are lent, from the events of books."""

from __future__ import annotations

from pathlib import Path

from outbox import Settings
from outbox.sinks import PostgresTarget, SinkJob

PROJECTIONS = Path(__file__).with_name("projections")


def jobs(settings: Settings) -> list[SinkJob]:
    """The sink `books`."""
    del settings
    return [SinkJob(name="books", events=["book"], projections=PROJECTIONS, target=PostgresTarget())]
