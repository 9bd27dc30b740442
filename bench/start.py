"""The start of a sink until its first events are applied, beside the least that Spark does with as many records."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from outbox.base.settings import Settings
from outbox.base.wait import wait_for
from outbox.jvm.java import java_home
from outbox.kafka.clients import spark_options
from outbox_lab.stack.command import sink
from outbox_lab.stack.process import Process

from bench import backlog, bare
from bench.event import topic
from bench.meter import Stopwatch

START_TIMEOUT_S = 300.0  # only a sink that hangs takes this long


class Started(NamedTuple):
    """How long a start took."""

    start_s: float
    start_cpu_s: float


class Bare(Process):
    """A Spark session that counts the topic's records and does nothing else."""

    def __init__(self, settings: Settings) -> None:
        super().__init__("bare", settings.home)
        self._settings = settings
        self._counted = self.folder / "counted"

    def argv(self) -> Sequence[str | Path]:
        return [sys.executable, bare.__file__, topic(self._settings), self._counted]

    def env(self) -> Mapping[str, str]:
        return {"JAVA_HOME": java_home(), "KAFKA": json.dumps(spark_options(self._settings))}

    def prepare(self) -> None:
        self._counted.unlink(missing_ok=True)

    def is_ready(self) -> bool:
        return self._counted.exists() and bool(self._counted.read_text())


def of_sink(settings: Settings, strategy: str, *, plain: bool = False) -> Started:
    """Start the sink on a topic that it has not read."""
    process = sink(settings, strategy, plain=plain)
    watch = Stopwatch()
    process.spawn()
    try:
        with backlog.applied(settings, strategy) as count:
            wait_for(
                "the first events",
                lambda: count() > 0,
                timeout_s=START_TIMEOUT_S,
                poll_s=backlog.POLL_S,
                needs=process.require_running,
            )
            return Started(*watch.read(process))
    finally:
        process.stop()


def of_spark(settings: Settings) -> Started:
    """Start the bare session."""
    session = Bare(settings)
    watch = Stopwatch()
    session.start()
    try:
        return Started(*watch.read(session))
    finally:
        session.kill()
