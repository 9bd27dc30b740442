"""Events of balances in, a Delta table out, which DuckDB or Spark read. Optional: to do without, delete this folder."""

from pathlib import Path

from outbox.sinks import LakehouseTarget, SinkJob

job = SinkJob(
    events=["balance"],
    strategy=Path("strategies/lakehouse.sql"),
    target=LakehouseTarget(schema=Path("table.sql"), totals=Path("projections/balances.sql")),
)
