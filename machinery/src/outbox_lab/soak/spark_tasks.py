"""The tasks that run on the executors of the sinks' cluster, as Spark's own REST interface says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import psutil
import requests

from outbox.jvm.java import property_value
from outbox_lab.stack.ports import LOOPBACK
from outbox_lab.stack.process import Process
from outbox_lab.stack.spark import ui_header

ANSWER_TIMEOUT_S = 5.0
EXECUTOR = "CoarseGrainedExecutorBackend"
LOST = "ExecutorLostFailure"
# https://spark.apache.org/docs/4.1.1/monitoring.html#rest-api
TASKS = "stages/{stage}/{attempt}/taskList?length=1000"


class Task(NamedTuple):
    """An attempt of a task."""

    number: int  # Spark's task id
    stage: int
    stage_attempt: int
    executor: str  # its number
    work: str  # the description of its job

    def __str__(self) -> str:
        return f"task {self.number} of stage {self.stage}" + (f" ({self.work})" if self.work else "")


class SparkTasks:
    """The tasks of one driver."""

    def __init__(self, properties: str) -> None:
        """``properties``: of the driver. Its UI is on."""
        self._url = f"http://{LOOPBACK}:{property_value('spark.ui.port', properties)}/api/v1/applications"
        self._header = ui_header(properties)

    def running(self) -> list[Task]:
        """The tasks that run, as far as the driver knows; none if the driver does not answer."""
        with suppress(requests.RequestException, ValueError):
            return list(self._running())
        return []

    def end(self, task: Task) -> str:
        """How a task has ended: its status, and its error if it has failed. Empty while it runs."""
        with suppress(requests.RequestException, ValueError):
            for one in self._of(TASKS.format(stage=task.stage, attempt=task.stage_attempt)):
                if one["taskId"] == task.number and one["status"] != "RUNNING":
                    return f"{one['status']} {one.get('errorMessage', '')}".strip()
        return ""

    def _running(self) -> Iterator[Task]:
        for stage in self._of("stages?status=active"):
            number, attempt = stage["stageId"], stage["attemptId"]
            for one in self._of(TASKS.format(stage=number, attempt=attempt)):
                if one["status"] == "RUNNING":
                    yield Task(one["taskId"], number, attempt, one["executorId"], stage.get("description", ""))

    def _of(self, path: str) -> Any:
        [application] = self._get(self._url)
        return self._get(f"{self._url}/{application['id']}/{path}")

    def _get(self, url: str) -> Any:
        answer = requests.get(url, headers=self._header, timeout=ANSWER_TIMEOUT_S)
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
        """Undo that."""
        with suppress(psutil.NoSuchProcess):
            self.process.resume()

    def kill(self) -> None:
        """End it (SIGKILL)."""
        with suppress(psutil.NoSuchProcess):
            self.process.kill()


def executors(cluster: Sequence[Process]) -> dict[str, Executor]:
    """By number, the executors of the cluster's workers."""
    found: dict[str, Executor] = {}
    for worker in cluster:
        for process in worker.processes():
            with suppress(psutil.Error):
                words = process.cmdline()
                if "--executor-id" in words and any(EXECUTOR in word for word in words):
                    number = words[words.index("--executor-id") + 1]
                    found[number] = Executor(number, process, worker)
    return found
