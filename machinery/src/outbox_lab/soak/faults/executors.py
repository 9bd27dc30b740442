"""Sinks on a Spark cluster: an executor or a worker killed with a task in hand, of a MERGE too.

A task is caught while its executor is frozen, so it runs until the kill. Spark itself says later that it was lost.
"""

from __future__ import annotations

import random
import time

from outbox_lab.soak.fault import Fault, Make, NotFired, wait_or_not_fired
from outbox_lab.soak.faults.sinks import wait_committed
from outbox_lab.soak.spark_tasks import LOST, Executor, SparkTasks, Task, executors
from outbox_lab.soak.testbed import ClusteredSinks, Testbed

CATCH_TIMEOUT_S = 180.0
END_TIMEOUT_S = 120.0  # of a lost task
ATTEMPTS = 5
# Within the description of each job of a MERGE: org.apache.spark.sql.delta.commands.merge of Delta 4.2.0.
MERGE = "MERGE operation"


class OfCluster(Fault):
    """A fault of the sinks that run on the cluster."""

    parts: tuple[str, ...] = ("cluster",)
    needs: tuple[str, ...] = ("sinks", "postgres", "kafka", "connect", "sinks-kafka", "sinks-postgres")

    def is_possible(self, testbed: Testbed) -> bool:
        return testbed.clustered is not None

    def heal(self, testbed: Testbed) -> None:
        for process in (*testbed.cluster, *testbed.sinks):
            process.start()

    @staticmethod
    def running(testbed: Testbed) -> ClusteredSinks:
        """The process of these sinks. Raises NotFired if it does not run."""
        process = testbed.clustered
        if process is None or not process.is_running():
            raise NotFired("the sinks on the cluster did not run")
        return process


class _TaskLost(OfCluster):
    """What runs a task is killed. The driver must go on."""

    work = ""  # within the description of the task's job

    def fire(self, testbed: Testbed, _: random.Random) -> str:
        process = self.running(testbed)
        driver = process.pid()
        task, killed, killed_s = self._lose(testbed, process)
        batch = wait_committed(testbed, testbed.names_of(process)[0], killed_s)
        if process.pid() != driver:
            raise NotFired(f"{process.name} has ended: {process.tail(1)}")
        return f"{killed} was killed with {task}; then {batch} was committed"

    def _lose(self, testbed: Testbed, process: ClusteredSinks) -> tuple[Task, str, float]:
        """Kill what runs a task, and it is lost. Returns the task, what was killed, and the time."""
        tasks = SparkTasks(process.driver_properties)
        for _ in range(ATTEMPTS):
            task, executor = caught(testbed, tasks, self.work)
            killed = self.kill(executor)
            killed_s = time.time()
            end = wait_or_not_fired(f"the end of {task}", lambda: tasks.end(task), timeout_s=END_TIMEOUT_S)  # noqa: B023
            if LOST in end:
                return task, killed, killed_s
            self.heal(testbed)
        raise NotFired(f"{ATTEMPTS} times, no task was lost")

    def kill(self, executor: Executor) -> str:
        """Kill what runs the task, and return what that was."""
        executor.kill()
        return str(executor)


class ExecutorKilled(_TaskLost):
    """SIGKILL to an executor on the Spark cluster that has a task. The driver must go on."""

    name = "sinks-executor-killed"


class ExecutorKilledInMerge(_TaskLost):
    """An executor is killed that has a task of a MERGE."""

    name = "sinks-executor-killed-in-merge"
    work = MERGE


class WorkerKilled(_TaskLost):
    """SIGKILL to a worker of the cluster and its executors, one of them with a task."""

    name = "sinks-worker-killed"

    def kill(self, executor: Executor) -> str:
        executor.worker.kill()
        return f"{executor.worker.name}, with {executor}"


class WorkerKilledInMerge(WorkerKilled):
    """A worker is killed whose executor has a task of a MERGE."""

    name = "sinks-worker-killed-in-merge"
    work = MERGE


def caught(testbed: Testbed, tasks: SparkTasks, work: str) -> tuple[Task, Executor]:
    """A task that runs, on an executor that is frozen now. ``work`` is within the description of its job.

    Raises NotFired if none was caught.
    """
    known: dict[str, Executor] = {}

    def one() -> tuple[Task, Executor] | None:
        nonlocal known
        running = [task for task in tasks.running() if work in task.work]
        if any(task.executor not in known for task in running):
            known = executors(testbed.cluster)
        for task in running:
            executor = known.get(task.executor)
            if executor is not None and executor.freeze():
                if not tasks.end(task):
                    return task, executor
                executor.resume()
        return None

    return wait_or_not_fired(f"a task {work} to be caught", one, timeout_s=CATCH_TIMEOUT_S, poll_s=0.01)


FAULTS: list[Make] = [ExecutorKilled, ExecutorKilledInMerge, WorkerKilled, WorkerKilledInMerge]
