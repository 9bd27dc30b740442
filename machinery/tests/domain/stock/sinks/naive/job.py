"""Item events in, stock out, without recognising duplicates. It shows what goes wrong then."""

from __future__ import annotations

from pathlib import Path

from outbox import Settings
from outbox.sinks import SinkJob
from stock.sinks.stock import job as stock

STRATEGY = Path(__file__).with_name("strategies") / "naive.sql"


def jobs(settings: Settings) -> list[SinkJob]:
    """The stock by one strategy."""
    del settings
    return [stock.job(STRATEGY)]
