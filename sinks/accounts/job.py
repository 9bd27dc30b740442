"""Each account with its status and its turnover, from the events of two aggregates, which come on two topics."""

from __future__ import annotations

from pathlib import Path

from outbox.base.settings import Settings
from outbox.sink.postgres.target import PostgresTarget
from outbox.sink.spec import SinkJob

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
