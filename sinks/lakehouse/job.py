"""Ledger events in, a Delta table out, which DuckDB or Spark read. Optional: to do without, delete this folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from outbox.base.settings import Settings
from outbox.sink.lakehouse.target import LakehouseTarget
from outbox.sink.spec import SinkJob
from sinks.balances import job as balances

HERE = Path(__file__).parent


def jobs(settings: Settings) -> list[SinkJob]:
    """The events of the job `balances`, merged into a table."""
    (events,) = balances.jobs(settings)
    target = LakehouseTarget(schema=HERE / "table.sql", totals=HERE / "projections" / "balances.sql")
    return [replace(events, strategies=[HERE / "strategies"], projections=HERE / "projections", target=target)]
