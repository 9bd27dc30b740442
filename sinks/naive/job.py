"""Balances, without recognising duplicates. It shows what goes wrong then.

Optional: to do without, delete this folder.
"""

from __future__ import annotations

from pathlib import Path

from outbox.base.settings import Settings
from outbox.sink.spec import SinkJob
from sinks.balances.job import balances

STRATEGY = Path(__file__).with_name("strategies") / "naive.sql"


def jobs(settings: Settings) -> list[SinkJob]:
    """The sink `balances-naive`."""
    del settings
    return [balances().by(STRATEGY)]
