"""Drain a backlog on a Spark cluster: which part of the time more workers share, and which part they do not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import psutil
from outbox.base.settings import Settings
from outbox_lab.stack.command import sink
from outbox_lab.stack.process import Process
from outbox_lab.stack.stack import Stack

from bench import backlog
from bench.meter import Drain, Meter


class Clustered(NamedTuple):
    """A drain, and the times of its parts, without the first one. A part is read while another one is applied."""

    drain: Drain
    read_s_per_million: float  # read and decoded, by all workers at once
    applied_s_per_million: float  # by the database, in one transaction; or by a MERGE
    driver_middle_mib: float  # of memory, of its Python and its JVM, when half of the events were applied
    driver_end_mib: float


def drain(settings: Settings, name: str, workers: int, events: int, report: Callable[[str], None]) -> Clustered:
    """Drain the topic with a sink on so many workers; with none in the driver's own threads."""
    stack = Stack(settings)
    stack.up(workers=workers, report=report)
    settings = stack.settings.replace(log_format="json", spark_master=stack.settings.spark_master if workers else None)
    executors = [stack.part(f"spark-worker-{number + 1}") for number in range(workers)]
    backlog.empty(settings)
    shutil.rmtree(Path(settings.lakehouse.removeprefix("file://")), ignore_errors=True)
    process = sink(settings, name)
    process.log_file.unlink(missing_ok=True)
    meter = Meter(events, stack.part("postgres"))
    memory: list[tuple[int, float]] = []
    count = weighed(backlog.applied(settings, name), process, memory)
    found = backlog.drain_with(process, count, meter, executors)
    lines = [json.loads(line) for line in process.log_file.read_text().splitlines() if line.startswith("{")]
    parts = [line for line in lines if line.get("event") == "applied"][1:]

    def total(name: str) -> int:
        return sum(int(part[name]) for part in parts)

    def s_per_million(name: str) -> float:
        return total(name) / total("rows") * 1e3

    middle_mib = next(mib for applied, mib in memory if applied >= events // 2)
    return Clustered(found, s_per_million("read_ms"), s_per_million("apply_ms"), middle_mib, memory[-1][1])


@contextmanager
def weighed(
    count: AbstractContextManager[Callable[[], int]], process: Process, memory: list[tuple[int, float]]
) -> Iterator[Callable[[], int]]:
    """The function ``count``, which also adds the memory of the process and its children to ``memory`` at a change."""
    with count as applied_now:

        def weigh() -> int:
            applied, rss_bytes = applied_now(), 0
            if memory and applied == memory[-1][0]:
                return applied
            for one in process.processes():
                with suppress(psutil.Error):
                    rss_bytes += one.memory_info().rss
            memory.append((applied, rss_bytes / (1 << 20)))
            return applied

        yield weigh
