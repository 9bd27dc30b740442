"""Events of items in, a Delta table out."""

from pathlib import Path

from outbox.sinks import LakehouseTarget, SinkJob

job = SinkJob(
    events=["item"],
    strategy=Path("strategies/lakehouse.sql"),
    target=LakehouseTarget(schema=Path("table.sql"), totals=Path("projections/stock.sql")),
)
