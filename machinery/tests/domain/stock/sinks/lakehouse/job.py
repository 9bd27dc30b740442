"""Events of items in, a Delta table out."""

from __future__ import annotations

from pathlib import Path

from outbox import Settings
from outbox.sinks import LakehouseTarget, SinkJob

HERE = Path(__file__).parent


def jobs(settings: Settings) -> list[SinkJob]:
    """The sink `lakehouse`."""
    del settings
    return [
        SinkJob(
            name="lakehouse",
            events=["item"],
            strategy=HERE / "strategies" / "lakehouse.sql",
            projections=HERE / "projections",
            target=LakehouseTarget(schema=HERE / "table.sql", totals=HERE / "projections" / "stock.sql"),
        )
    ]
