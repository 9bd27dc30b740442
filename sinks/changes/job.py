"""Changes of the table `accounts` in, balances out: raw CDC by a second connector.

Optional: to do without, delete this folder and connect/changes.json.
"""

from __future__ import annotations

from pathlib import Path

from outbox.base.settings import Settings
from outbox.relay import connectors
from outbox.sink.postgres.target import PostgresTarget
from outbox.sink.spec import SinkJob
from sinks.changes.records import ChangeDecoder

HERE = Path(__file__).parent


def jobs(settings: Settings) -> list[SinkJob]:
    """One job with one strategy of its own."""
    return [
        SinkJob(
            topic=connectors.load(settings, "changes").topic,
            decoder=ChangeDecoder(),
            projections=HERE / "projections",
            target=PostgresTarget(),
            strategies=[HERE / "strategies"],
            carries="states",
        )
    ]
