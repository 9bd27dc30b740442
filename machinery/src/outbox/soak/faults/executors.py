"""Sinks on a Spark cluster: an executor killed with a task in hand.

A task is caught while its executor is frozen, so it runs until the kill. Spark itself says later that it was lost.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from outbox.soak.fault import Fault, NotFired, wait_or_not_fired
from outbox.soak.faults.sinks import wait_committed
from outbox.soak.spark_tasks import LOST, Executor, SparkTasks, Task, executors
from outbox.soak.testbed import ClusteredSinks, Testbed

CATCH_TIMEOUT_S = 180.0
END_TIMEOUT_S = 120.0  # of a lost task
ATTEMPTS = 5


class ExecutorKilled(Fault):
    """SIGKILL to an executor on the Spark cluster that has a task. The driver must go on."""

    name = "sinks-executor-killed"
    parts = ("cluster",)
    needs = ("sinks", "postgres", "kafka", "connect", "sinks-kafka", "sinks-postgres")
    lasts_s = (0.0, 0.0)

    def is_possible(self, testbed: Testbed) -> bool:
        return testbed.clustered is not None

    def fire(self, testbed: Testbed, chance: random.Random) -> str:
        del chance
        process = testbed.clustered
        if process is None or not process.is_running():
            raise NotFired("the sinks on the cluster did not run")
        driver = process.pid()
        task, executor, killed_s = self._kill(testbed, process)
        batch = wait_committed(testbed, testbed.names_of(process)[0], killed_s)
        if process.pid() != driver:
            raise NotFired(f"{process.name} has ended: {process.tail(1)}")
        return f"{executor} was killed with {task}; then {batch} was committed"

    def heal(self, testbed: Testbed) -> None:
        for process in (*testbed.cluster, *testbed.sinks):
            process.start()

    @staticmethod
    def _kill(testbed: Testbed, process: ClusteredSinks) -> tuple[Task, Executor, float]:
        """Kill an executor with a task that is lost with it. Returns both, and the time."""
        tasks = SparkTasks(process.ui_port)
        for _ in range(ATTEMPTS):
            task, executor = _caught(testbed, tasks)
            executor.kill()
            killed_s = time.time()
            end = wait_or_not_fired(f"the end of {task}", lambda: tasks.end(task), timeout_s=END_TIMEOUT_S)  # noqa: B023
            if LOST in end:
                return task, executor, killed_s
        raise NotFired(f"{ATTEMPTS} times, no task was lost")


def _caught(testbed: Testbed, tasks: SparkTasks) -> tuple[Task, Executor]:
    """A task that runs, on an executor that is frozen now. Raises NotFired if none was caught."""
    known: dict[str, Executor] = {}

    def caught() -> tuple[Task, Executor] | None:
        nonlocal known
        running = tasks.running()
        if any(task.executor not in known for task in running):
            known = executors(testbed.cluster)
        for task in running:
            executor = known.get(task.executor)
            if executor is not None and executor.freeze():
                if not tasks.end(task):
                    return task, executor
                executor.resume()
        return None

    return wait_or_not_fired("a task to be caught", caught, timeout_s=CATCH_TIMEOUT_S, poll_s=0.01)


FAULTS: list[Callable[[], Fault]] = [ExecutorKilled]
