"""Sinks with a Delta table: their driver killed in a MERGE, and between the commit of the table and that of Postgres.

The table says how far each of its commits goes. So what it says, and what Postgres says, is the evidence.
"""

from __future__ import annotations

import os
import random
import signal
from contextlib import closing
from pathlib import Path

from outbox.base.database import connect
from outbox.base.settings import SinkRole
from outbox.sink.applying.lakehouse import table
from outbox.sink.remembering import fence, positions
from outbox_lab.soak.fault import A_WHILE_S, Make, NotFired, wait_or_not_fired
from outbox_lab.soak.faults.executors import MERGE, OfCluster, caught
from outbox_lab.soak.spark_tasks import SparkTasks
from outbox_lab.soak.testbed import ClusteredSinks, Testbed

COMMIT_TIMEOUT_S = 180.0
ATTEMPTS = 10


class _DriverKilled(OfCluster):
    """SIGKILL to the driver, at a certain moment."""

    parts: tuple[str, ...] = ("sinks", "cluster")
    needs = ("postgres", "kafka", "connect", "sinks-kafka", "sinks-postgres")
    lasts_s = A_WHILE_S

    def fire(self, testbed: Testbed, _: random.Random) -> str:
        process = self.running(testbed)
        self.victims = (process.name,)
        return self.kill(testbed, process, testbed.names_of(process)[0])

    def kill(self, testbed: Testbed, process: ClusteredSinks, sink: str) -> str:
        """Kill the process of this sink at that moment, and return the evidence. Raises NotFired if it has passed."""
        raise NotImplementedError


class KilledInMerge(_DriverKilled):
    """SIGKILL to the driver while a task of its MERGE stands still."""

    name = "sinks-killed-in-merge"

    def kill(self, testbed: Testbed, process: ClusteredSinks, sink: str) -> str:
        task, executor = caught(testbed, SparkTasks(process.driver_properties), MERGE)
        try:
            before = table.positions(testbed.settings, sink)
            process.kill()
        finally:
            executor.resume()  # it ends by itself: it has no driver any more
        if table.positions(testbed.settings, sink) != before:
            raise NotFired(f"{sink}: the MERGE of {task} was committed")
        return f"{process.name} was killed in {task}, and the table did not change"


class KilledBehindMerge(_DriverKilled):
    """SIGKILL to the driver between the commit of the table and that of Postgres."""

    name = "sinks-killed-behind-merge"

    def kill(self, testbed: Testbed, process: ClusteredSinks, sink: str) -> str:
        for _ in range(ATTEMPTS):
            if self._is_frozen_behind(testbed, process, sink):
                process.kill()
                ahead = _ahead_of_dead(testbed, sink)
                if ahead:
                    return f"{process.name} was killed, and the table was ahead of Postgres by {ahead} records"
                process.start()
        raise NotFired(f"{ATTEMPTS} times, {sink} was not caught behind a MERGE")

    @staticmethod
    def _is_frozen_behind(testbed: Testbed, process: ClusteredSinks, sink: str) -> bool:
        """Freeze the driver at its next MERGE; whether its table is ahead then. If not it runs on."""
        driver, log = process.pid(), _log(testbed, sink)
        if driver is None:
            raise NotFired(f"{process.name} did not run")
        before = _newest(log)
        wait_or_not_fired("a MERGE", lambda: _newest(log) != before, timeout_s=COMMIT_TIMEOUT_S, poll_s=0.002)
        os.kill(driver, signal.SIGSTOP)  # it writes to Postgres, and its JVM to the table
        is_ahead = False
        try:
            is_ahead = _ahead(testbed, sink) > 0
        finally:
            if not is_ahead:
                os.kill(driver, signal.SIGCONT)
        return is_ahead


def _log(testbed: Testbed, sink: str) -> Path:
    return Path(table.location(testbed.settings, sink).removeprefix("file://")) / "_delta_log"


def _newest(log: Path) -> str:
    return max((file.name for file in log.glob("*.json")), default="")


def _ahead(testbed: Testbed, sink: str) -> int:
    """By how many records the table is ahead of Postgres."""
    with closing(connect(testbed.settings, SinkRole.AUDITOR)) as connection, connection.cursor() as cursor:
        known = positions.read_all(cursor, sink)
    return sum(
        offset - known.get(topic, {}).get(partition, 0)
        for topic, offsets in table.positions(testbed.settings, sink).items()
        for partition, offset in offsets.items()
    )


def _ahead_of_dead(testbed: Testbed, sink: str) -> int:
    """By how many records it is ahead once a killed driver's session is gone: its last commit may be late."""
    with closing(connect(testbed.settings, SinkRole.AUDITOR)) as connection, connection.cursor() as cursor:
        fence.lock(cursor, sink)
        return _ahead(testbed, sink)


FAULTS: list[Make] = [KilledInMerge, KilledBehindMerge]
