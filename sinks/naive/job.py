"""Ledger events in, balances out, without recognising duplicates. It shows what goes wrong then.

Optional: to do without, delete this folder.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from outbox.base.settings import Settings
from outbox.sink.spec import SinkJob
from sinks.balances import job as balances

STRATEGIES = Path(__file__).with_name("strategies")


def jobs(settings: Settings) -> list[SinkJob]:
    """The job `balances` with one strategy."""
    return [replace(job, strategies=[STRATEGIES]) for job in balances.jobs(settings)]
