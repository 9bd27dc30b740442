"""Balances, without recognising duplicates. It shows what goes wrong then.

Optional: to do without, delete this folder.
"""

from __future__ import annotations

from pathlib import Path

from outbox import Settings
from outbox.sinks import SinkJob

from sinks.balances.job import balances

STRATEGIES = Path(__file__).with_name("strategies")


def jobs(settings: Settings) -> list[SinkJob]:
    """The sink `balances-naive`; and the same that counts how often it applies each event."""
    del settings
    return [balances().by(STRATEGIES / name) for name in ("naive.sql", "naive-logged.sql")]
