"""The sample's sink jobs: ledger events in, balances out; in Postgres, or as a table of a lakehouse.

To make it yours: the columns in staged.sql, how they are decoded in events.py, what becomes of them in projections/.
What is new and what is a duplicate, strategies/ decides. lakehouse/ is optional: without it, delete the second job.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from outbox.event import Contract
from outbox.settings import Settings
from outbox.sink.job import Job
from outbox.sink.verdict import Judge
from sinks.events import KEY, events

HERE = Path(__file__).parent


def jobs(settings: Settings) -> list[Job]:
    """The jobs whose strategies `outbox sink` runs."""
    ledger_events = Job(
        topic=settings.topic,
        decode=events,
        judge=Judge(Contract().schema, KEY),
        staged=HERE / "staged.sql",
        strategies=HERE / "strategies",
        projection=HERE / "projections" / "balances.sql",
    )
    lakehouse = replace(
        ledger_events,
        strategies=HERE / "lakehouse" / "strategies",
        projection=HERE / "lakehouse" / "balances.sql",
        table=HERE / "lakehouse" / "table.sql",
    )
    return [ledger_events, lakehouse]
