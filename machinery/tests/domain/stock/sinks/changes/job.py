"""Changes of the table `items` in, stock out: raw CDC by a second connector."""

from __future__ import annotations

from pathlib import Path

from outbox import Settings
from outbox.sinks import PostgresTarget, SinkJob, load_connector
from stock.sinks.changes.records import ChangeDecoder

HERE = Path(__file__).parent


def jobs(settings: Settings) -> list[SinkJob]:
    """The sink `changes`."""
    return [
        SinkJob(
            name="changes",
            decoders={load_connector(settings, "changes").topic: ChangeDecoder()},
            strategy=HERE / "strategies" / "changes.sql",
            projections=HERE / "projections",
            target=PostgresTarget(),
            carries="states",
        )
    ]
