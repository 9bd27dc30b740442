"""Drain a backlog on a Spark cluster: which part of the time more workers share, and which part they do not."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import NamedTuple

from bench import backlog
from bench.meter import Drain, Meter
from outbox.base.settings import Settings
from outbox.stack.command import sink
from outbox.stack.stack import Stack


class Clustered(NamedTuple):
    """A drain, and the times of its parts, without the first one. A part is staged while another one is applied."""

    drain: Drain
    staged_s_per_million: float  # read, decoded and staged, by all workers at once
    applied_s_per_million: float  # by the database, in one transaction


def drain(settings: Settings, workers: int, events: int, report: Callable[[str], None]) -> Clustered:
    """Drain the topic with the dedup sink on so many workers; with none in the driver's own threads."""
    stack = Stack(settings)
    stack.up(workers=workers, report=report)
    settings = stack.settings.model_copy(
        update={
            "log_format": "json",
            "spark_master": stack.settings.spark_master if workers else None,
        }
    )
    executors = [stack.part(f"spark-worker-{number + 1}") for number in range(workers)]
    backlog.empty(settings)
    process = sink(settings, "balances")
    process.log_file.unlink(missing_ok=True)
    meter = Meter(events, stack.part("postgres"))
    found = backlog.drain_with(process, backlog.applied(settings, "balances"), meter, executors)
    lines = [json.loads(line) for line in process.log_file.read_text().splitlines() if line.startswith("{")]
    parts = [line for line in lines if line.get("event") == "applied"][1:]

    def total(name: str) -> int:
        return sum(int(part[name]) for part in parts)

    def s_per_million(name: str) -> float:
        return total(name) / total("rows") * 1e3

    return Clustered(found, s_per_million("read_ms"), s_per_million("apply_ms"))
