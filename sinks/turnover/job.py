"""The money that was moved each day, in euros: a job with PySpark of its own (docs/spark.md).

Optional: to do without, delete this folder, the tests named after it and migrations/sink/0003_turnover.py, and let the
next migration come after sink_domain_0002.
"""

from __future__ import annotations

from pathlib import Path

from outbox import Settings
from outbox.sinks import PostgresTarget, SinkJob

HERE = Path(__file__).parent


def jobs(settings: Settings) -> list[SinkJob]:
    """The sink `turnover`. Of the two events of a transfer it takes the credit, so that each amount counts once."""
    del settings
    return [
        SinkJob(
            name="turnover",
            events=["balance.credited"],
            transform="sinks.turnover.transform:in_euros",
            projections=HERE / "projections",
            target=PostgresTarget(),
        )
    ]
