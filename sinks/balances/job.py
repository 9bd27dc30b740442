"""The balance of each account, from the events of balances."""

from __future__ import annotations

from pathlib import Path

from outbox import Settings
from outbox.sinks import PostgresTarget, SinkJob

HERE = Path(__file__).parent


def jobs(settings: Settings) -> list[SinkJob]:
    """The sink `balances`; beside it, to compare, the same by other strategies."""
    del settings
    others = ("merge", "offset-log", "offsets", "upsert", "versions")
    return [balances(), *(balances().by(strategy) for strategy in others)]


def balances() -> SinkJob:
    """Balances by the default strategy."""
    return SinkJob(
        name="balances",
        events=["balance"],
        projections=HERE / "projections",
        target=PostgresTarget(),
    )
