"""Events of balances in, a Delta table out, which DuckDB or Spark read. Optional: to do without, delete this folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from outbox import Settings
from outbox.sinks import LakehouseTarget, SinkJob

from sinks.balances.job import balances

HERE = Path(__file__).parent


def jobs(settings: Settings) -> list[SinkJob]:
    """The sink `lakehouse`: the events of `balances`, merged into a table."""
    del settings
    target = LakehouseTarget(schema=HERE / "table.sql", totals=HERE / "projections" / "balances.sql")
    strategy = HERE / "strategies" / "lakehouse.sql"
    return [replace(balances(), name="lakehouse", strategy=strategy, projections=HERE / "projections", target=target)]
