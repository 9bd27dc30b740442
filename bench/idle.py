"""Cost of the chain while no event is written: the processor time of each of its parts."""

from __future__ import annotations

import time
from typing import NamedTuple

from outbox.base.settings import Settings
from outbox_lab.stack.command import sink
from outbox_lab.stack.stack import Stack

from bench.meter import cpu_s

SERVERS = ("postgres", "kafka", "connect")
SETTLED_S = 15.0  # after its start a sink reads metadata, and the JVM compiles


class Idle(NamedTuple):
    """How many cores each part keeps busy."""

    postgres_cores: float
    kafka_cores: float
    connect_cores: float
    sinks_cores: float


def measure(settings: Settings, sinks: tuple[str, ...], trigger_interval_ms: int, seconds: float) -> Idle:
    """Let the sinks run beside the stack, with this interval between their batches, and read the clocks."""
    process = sink(settings.replace(sink_trigger_interval_ms=trigger_interval_ms), *sinks)
    parts = [*map(Stack(settings).part, SERVERS), process]
    process.start()
    try:
        time.sleep(SETTLED_S)
        before = [cpu_s(part.processes()) for part in parts]
        time.sleep(seconds)
        after = [cpu_s(part.processes()) for part in parts]
    finally:
        process.stop()
    return Idle(*((end - begin) / seconds for begin, end in zip(before, after, strict=True)))
