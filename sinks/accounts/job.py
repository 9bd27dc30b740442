"""Each account with its status and its turnover, from the events of two aggregates, which come on two topics."""

from __future__ import annotations

from pathlib import Path

from outbox import Settings
from outbox.sinks import PostgresTarget, SinkJob

HERE = Path(__file__).parent


def jobs(settings: Settings) -> list[SinkJob]:
    """The sink `accounts`."""
    del settings
    return [
        SinkJob(
            name="accounts",
            events=["account", "balance"],
            projections=HERE / "projections",
            target=PostgresTarget(),
        )
    ]
