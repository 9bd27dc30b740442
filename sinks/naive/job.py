"""Balances, without recognising duplicates. It shows what goes wrong then.

Optional: to do without, delete this folder.
"""

from __future__ import annotations

from pathlib import Path

from outbox import Settings
from outbox.sinks import SinkJob

from sinks.balances.job import balances

STRATEGY = Path(__file__).with_name("strategies") / "naive.sql"


def jobs(settings: Settings) -> list[SinkJob]:
    """The sink `balances-naive`."""
    del settings
    return [balances().by(STRATEGY)]
