"""The sink `lakehouse` of the domain with an Iceberg table in place of its Delta table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from outbox.sinks import IcebergTarget
from tests.support.suite import DOMAIN

HERE = Path(__file__).parent
TOTALS = DOMAIN / "stock" / "sinks" / "lakehouse" / "projections" / "stock.sql"
STRATEGY = HERE / "iceberg.sql"
ATTRIBUTES: dict[str, Any] = {
    "target": IcebergTarget(HERE / "table.sql", TOTALS),
    "strategy": STRATEGY,
}
