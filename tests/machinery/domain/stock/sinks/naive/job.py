"""Item events in, stock out, without recognising duplicates. It shows what goes wrong then."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from outbox.base.settings import Settings
from outbox.sink.spec import SinkJob
from stock.sinks.stock import job as stock

STRATEGIES = Path(__file__).with_name("strategies")


def jobs(settings: Settings) -> list[SinkJob]:
    """The job `stock` with one strategy."""
    return [replace(job, strategies=[STRATEGIES]) for job in stock.jobs(settings)]
