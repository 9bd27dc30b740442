"""Sinks on a Spark cluster: an executor, a worker or the driver is killed in the middle of a MERGE, or behind it.

A task is caught while its executor is frozen, so it runs until the kill. Spark itself says later that it was lost. A
Delta table says how far each of its commits goes: that and what Postgres says is the evidence of the others.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from outbox.base.database import connect
from outbox.base.heavy import requests
from outbox.base.settings import SinkRole
from outbox.jvm.java import property_value
from outbox.sink.applying.lakehouse import table
from outbox.sink.remembering import fence, positions
from outbox_lab.soak.fault import NotFired, Strike, wait_or_not_fired
from outbox_lab.soak.faults.sinks import restart, wait_committed
from outbox_lab.soak.testbed import SinkPart, Testbed
from outbox_lab.stack.ports import LOOPBACK
from outbox_lab.stack.process import Process
from outbox_lab.stack.spark import ui_header

CATCH_TIMEOUT_S = 180.0
END_TIMEOUT_S = 120.0  # of a lost task
COMMIT_TIMEOUT_S = 180.0
LOSE_ATTEMPTS, FREEZE_ATTEMPTS = 5, 10
LOST = "ExecutorLostFailure"
# Within the description of each job of a MERGE: org.apache.spark.sql.delta.commands.merge of Delta 4.2.0.
MERGE = "MERGE operation"


def has_cluster(testbed: Testbed) -> bool:
    return testbed.clustered is not None


def _running(testbed: Testbed) -> tuple[SinkPart, str]:
    """The process of the sinks on the cluster, and the first of them. Raises NotFired if it does not run."""
    process = testbed.clustered
    if process is None or not process.is_running():
        raise NotFired("the sinks on the cluster did not run")
    return process, process.names[0]


# Executors and workers: the driver must go on ----------------------------------------------------------------------


def kill_executor(executor: Executor) -> str:
    with suppress(psutil.NoSuchProcess):
        executor.process.kill()
    return str(executor)


def kill_worker(executor: Executor) -> str:
    executor.worker.kill()
    return f"{executor.worker.name}, with {executor}"


def lose_task(strike: Strike, kill: Callable[[Executor], str]) -> str:
    """Kill what runs a task of a MERGE, and it is lost."""
    process, sink = _running(strike.testbed)
    driver, tasks = process.pid(), SparkTasks(strike.testbed.stack.driver_properties)
    for _ in range(LOSE_ATTEMPTS):
        task, executor = _catch(strike.testbed, tasks)
        killed, killed_s = kill(executor), time.time()
        end = wait_or_not_fired(f"the end of {task}", lambda: tasks.end(task), timeout_s=END_TIMEOUT_S)  # noqa: B023
        if LOST in end:
            break
        restart(strike)
    else:
        raise NotFired(f"{LOSE_ATTEMPTS} times, no task was lost")
    batch = wait_committed(strike.testbed, sink, killed_s)
    if process.pid() != driver:
        raise NotFired(f"{process.name} has ended: {process.tail(1)}")
    return f"{killed} was killed with {task}; then {batch} was committed"


# The driver, at a moment of its MERGE ------------------------------------------------------------------------------


def kill_in_merge(strike: Strike) -> str:
    testbed = strike.testbed
    process, sink = _running(testbed)
    strike.victims = (process.name,)
    task, executor = _catch(testbed, SparkTasks(testbed.stack.driver_properties))
    try:
        before = table.positions(testbed.settings, sink)
        process.kill()
    finally:
        executor.resume()  # it ends by itself: it has no driver any more
    if table.positions(testbed.settings, sink) != before:
        raise NotFired(f"{sink}: the MERGE of {task} was committed")
    return f"{process.name} was killed in {task}, and the table did not change"


def kill_behind_merge(strike: Strike) -> str:
    testbed = strike.testbed
    process, sink = _running(testbed)
    strike.victims = (process.name,)
    for _ in range(FREEZE_ATTEMPTS):
        if _is_frozen_behind(testbed, process, sink):
            process.kill()
            if ahead := _ahead_of_dead(testbed, sink):
                return f"{process.name} was killed, and the table was ahead of Postgres by {ahead} records"
            process.start()
    raise NotFired(f"{FREEZE_ATTEMPTS} times, {sink} was not caught behind a MERGE")


def _is_frozen_behind(testbed: Testbed, process: SinkPart, sink: str) -> bool:
    """Freeze the driver at its next MERGE; whether its table is ahead then. If not it runs on."""
    driver = process.pid()
    if driver is None:
        raise NotFired(f"{process.name} did not run")
    log = Path(table.location(testbed.settings, sink).removeprefix("file://")) / "_delta_log"

    def newest() -> str:
        return max((file.name for file in log.glob("*.json")), default="")

    before = newest()
    wait_or_not_fired("a MERGE", lambda: newest() != before, timeout_s=COMMIT_TIMEOUT_S, poll_s=0.002)
    os.kill(driver, signal.SIGSTOP)  # it writes to Postgres, and its JVM to the table
    is_ahead = False
    try:
        is_ahead = _ahead(testbed, sink) > 0
    finally:
        if not is_ahead:
            os.kill(driver, signal.SIGCONT)
    return is_ahead


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


# Tasks, as Spark's own REST interface says (https://spark.apache.org/docs/4.1.1/monitoring.html#rest-api) ----------


class Task(NamedTuple):
    """An attempt of a task."""

    number: int  # Spark's task id
    stage: str  # and its attempt: 4/0
    executor: str  # its number

    def __str__(self) -> str:
        return f"task {self.number} of stage {self.stage}"


class SparkTasks:
    """The tasks of one driver."""

    def __init__(self, properties: str) -> None:
        """``properties``: of the driver. Its UI is on."""
        self._url = f"http://{LOOPBACK}:{property_value('spark.ui.port', properties)}/api/v1/applications"
        self._header = ui_header(properties)

    def merging(self) -> list[Task]:
        """The tasks of a MERGE that run; none if the driver does not answer."""
        found: list[Task] = []
        with suppress(requests.RequestException, ValueError):
            for active in self._get("/stages?status=active"):
                if MERGE in active.get("description", ""):
                    stage = f"{active['stageId']}/{active['attemptId']}"
                    running = (one for one in self._of(stage) if one["status"] == "RUNNING")
                    found += [Task(one["taskId"], stage, one["executorId"]) for one in running]
        return found

    def end(self, task: Task) -> str:
        """How a task has ended: its status, and its error if it has failed. Empty while it runs."""
        with suppress(requests.RequestException, ValueError):
            for one in self._of(task.stage):
                if one["taskId"] == task.number and one["status"] != "RUNNING":
                    return f"{one['status']} {one.get('errorMessage', '')}".strip()
        return ""

    def _of(self, stage: str) -> Any:
        return self._get(f"/stages/{stage}/taskList?length=1000")

    def _get(self, path: str) -> Any:
        [application] = self._answer("")
        return self._answer(f"/{application['id']}{path}")

    def _answer(self, path: str) -> Any:
        answer = requests.get(f"{self._url}{path}", headers=self._header, timeout=5)
        answer.raise_for_status()
        return answer.json()


@dataclass(frozen=True)
class Executor:
    """An executor of the cluster."""

    number: str
    process: psutil.Process
    worker: Process

    def __str__(self) -> str:
        return f"executor {self.number}, process {self.process.pid},"

    def freeze(self) -> bool:
        """Stop it (SIGSTOP); whether it was there."""
        with suppress(psutil.NoSuchProcess):
            self.process.suspend()
            return True
        return False

    def resume(self) -> None:
        with suppress(psutil.NoSuchProcess):
            self.process.resume()


def _executors(cluster: Sequence[Process]) -> dict[str, Executor]:
    """By number, the executors of the cluster's workers."""
    found: dict[str, Executor] = {}
    for worker in cluster:
        for process in worker.processes():
            with suppress(psutil.Error):
                words = process.cmdline()
                if "--executor-id" in words and any("CoarseGrainedExecutorBackend" in word for word in words):
                    number = words[words.index("--executor-id") + 1]
                    found[number] = Executor(number, process, worker)
    return found


def _catch(testbed: Testbed, tasks: SparkTasks) -> tuple[Task, Executor]:
    """A task of a MERGE that runs, on an executor that is frozen now."""
    known: dict[str, Executor] = {}

    def one() -> tuple[Task, Executor] | None:
        nonlocal known
        running = tasks.merging()
        if any(task.executor not in known for task in running):
            known = _executors(testbed.cluster)
        for task in running:
            executor = known.get(task.executor)
            if executor is not None and executor.freeze():
                if not tasks.end(task):
                    return task, executor
                executor.resume()
        return None

    return wait_or_not_fired("a task of a MERGE to be caught", one, timeout_s=CATCH_TIMEOUT_S, poll_s=0.01)
