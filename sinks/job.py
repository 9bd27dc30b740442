"""The sample's sink jobs: ledger events in, balances out; in Postgres, or as a table of a lakehouse. And in changes/
the other way: rows in, balances out.

To make it yours: the columns in staged.sql, how they are decoded in events.py, what becomes of them in projections/.
What is new and what is a duplicate, strategies/ decides. Optional are changes/, with connect/changes.json, and
lakehouse/: without them, delete their jobs.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from outbox.base.settings import Settings
from outbox.relay import connectors
from outbox.sink.job import Job
from outbox.sink.verdict import Judge
from outbox.writing.contract import Contract
from sinks.changes.events import Judge as ChangeJudge
from sinks.changes.events import changes
from sinks.events import KEY, events, schema_file

HERE = Path(__file__).parent


def jobs(settings: Settings) -> list[Job]:
    """The jobs whose strategies `outbox sink` runs."""
    ledger_events = Job(
        topic=settings.topic,
        decode=events,
        judge=Judge(Contract(schema_file()).schema, KEY),
        staged=HERE / "staged.sql",
        strategies=HERE / "strategies",
        projection=HERE / "projections" / "balances.sql",
        rebuild=HERE / "projections" / "balances.rebuild.sql",
    )
    account_changes = Job(
        topic=connectors.load(settings, "changes").topic,
        decode=changes,
        judge=ChangeJudge(),
        staged=HERE / "changes" / "staged.sql",
        strategies=HERE / "changes" / "strategies",
        projection=HERE / "changes" / "projection.sql",
        carries="states",
    )
    lakehouse = replace(
        ledger_events,
        strategies=HERE / "lakehouse" / "strategies",
        projection=HERE / "lakehouse" / "balances.sql",
        rebuild=None,
        table=HERE / "lakehouse" / "table.sql",
    )
    return [ledger_events, account_changes, lakehouse]
