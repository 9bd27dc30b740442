"""Item events in, stock out."""

from __future__ import annotations

from pathlib import Path

from outbox import Settings
from outbox.sink.strategy import BUILT_IN
from outbox.sinks import PostgresTarget, SinkJob

PROJECTIONS = Path(__file__).with_name("projections")


def jobs(settings: Settings) -> list[SinkJob]:
    """A sink for each built-in strategy, called like it: the tests compare strategies."""
    del settings
    return [job(strategy.stem) for strategy in sorted(BUILT_IN.glob("*.sql"))]


def job(strategy: str | Path) -> SinkJob:
    """The stock by a strategy."""
    return SinkJob(
        name=Path(strategy).stem,
        events=["item"],
        projections=PROJECTIONS,
        target=PostgresTarget(),
        strategy=strategy,
    )
