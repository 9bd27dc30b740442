"""The relay: its replication connection, its connector, and two workers that believe they have the task."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress

import requests

from outbox.base.errors import Failure
from outbox.base.settings import Settings, SourceRole
from outbox.base.wait import wait_for
from outbox.soak.fault import Fault, NotFired
from outbox.soak.testbed import Testbed
from outbox.stack import ports
from outbox.stack.connect import Connect

TASK_TIMEOUT_S = 120.0
TERMINATE = """
SELECT pid FROM pg_stat_replication WHERE usename = %s AND pg_terminate_backend(pid)
"""
RUNNING_TIMEOUT_S = 240.0  # a transaction of a task that was fenced ends after a minute, and only then `apply` goes on


class ReplicationTerminated(Fault):
    """`pg_terminate_backend` on Debezium's connection, several times."""

    name = "replication-terminated"
    parts = ("connect", "postgres")
    lasts_s = (0.0, 0.0)

    def fire(self, testbed: Testbed, chance: random.Random) -> str:
        pids = [self._terminate(testbed) for _ in range(chance.randint(1, 3))]
        return f"backends {', '.join(map(str, pids))} were terminated"

    def heal(self, testbed: Testbed) -> None:
        wait_running(testbed)

    @staticmethod
    def _terminate(testbed: Testbed) -> int:
        role = testbed.settings.role_name(SourceRole.CDC)

        def terminated() -> list[tuple[int]]:
            return testbed.superuser(TERMINATE, [role])

        try:
            [(pid,), *_] = wait_for("a replication connection", terminated, timeout_s=60)
        except TimeoutError as error:
            raise NotFired(str(error)) from error
        return int(pid)


class ConnectorRestarted(Fault):
    """Connector and task are restarted through Connect's REST interface."""

    name = "connector-restarted"
    parts = ("connect",)
    lasts_s = (0.0, 0.0)

    def fire(self, testbed: Testbed, chance: random.Random) -> str:
        del chance
        settings = testbed.settings
        url = f"{settings.connect_url}/connectors/{settings.connector}/restart?includeTasks=true&onlyFailed=false"
        answer = requests.post(url, timeout=30)
        if not answer.ok:
            raise NotFired(f"Connect answered {answer.status_code}")
        return f"Connect answered {answer.status_code}"

    def heal(self, testbed: Testbed) -> None:
        wait_running(testbed)


class ConnectorReconfigured(Fault):
    """The connector gets another configuration, and then its own again."""

    name = "connector-reconfigured"
    parts = ("connect",)

    def fire(self, testbed: Testbed, chance: random.Random) -> str:
        settings = testbed.settings
        url = f"{settings.connect_url}/connectors/{settings.connector}/config"
        config = requests.get(url, timeout=30).json()
        config["max.batch.size"] = str(chance.choice([64, 256, 1024]))
        answer = requests.put(url, json=config, timeout=30)
        if not answer.ok:
            raise NotFired(f"Connect answered {answer.status_code}")
        return f"max.batch.size is {config['max.batch.size']}"

    def heal(self, testbed: Testbed) -> None:
        def applied() -> bool:
            with suppress(Failure, TimeoutError):  # the database may be broken too
                testbed.apply()
                return True
            return False

        wait_for("the connector to have its own configuration", applied, timeout_s=RUNNING_TIMEOUT_S, poll_s=1)


class _TwoWorkers(Fault):
    """A fault with a second worker in the group."""

    parts = ("connect",)
    lasts_s = (2.0, 5.0)

    def __init__(self) -> None:
        self._second: Connect | None = None

    def heal(self, testbed: Testbed) -> None:
        testbed.worker.resume()
        testbed.worker.start()
        if self._second is not None:
            self._second.stop()
        wait_running(testbed)

    def start_second(self, testbed: Testbed) -> str:
        """Start the second worker, and return its URL."""
        url = f"http://{ports.LOOPBACK}:{ports.choose(0)[0]}"
        settings = testbed.stack.through("connect-kafka", "debezium-postgres").model_copy(update={"connect_url": url})
        self._second = SecondWorker(settings)
        self._second.start()
        return url

    @staticmethod
    def wait_for_task(testbed: Testbed, url: str) -> str:
        """Wait until the second worker has the task, and return its name."""

        def has_task() -> str | None:
            with suppress(ValueError, KeyError, requests.RequestException):
                status = requests.get(f"{url}/connectors/{testbed.settings.connector}/status", timeout=5).json()
                tasks = [task for task in status.get("tasks", []) if task["state"] == "RUNNING"]
                if tasks and tasks[0]["worker_id"].endswith(url.removeprefix("http://")):
                    return str(tasks[0]["worker_id"])
            return None

        try:
            return str(wait_for("the second worker to have the task", has_task, timeout_s=TASK_TIMEOUT_S))
        except TimeoutError as error:
            raise NotFired(str(error)) from error


class Zombie(_TwoWorkers):
    """The worker is frozen until another worker has its task. Then it returns, and must be fenced."""

    name = "connect-zombie"

    def fire(self, testbed: Testbed, chance: random.Random) -> str:
        del chance
        testbed.worker.pause()
        taken = self.wait_for_task(testbed, self.start_second(testbed))
        return f"worker {taken} took the task"


class Rebalanced(_TwoWorkers):
    """A second worker joins, the first leaves and returns: the task moves there and back."""

    name = "connect-rebalanced"

    def fire(self, testbed: Testbed, chance: random.Random) -> str:
        del chance
        url = self.start_second(testbed)
        testbed.worker.stop()
        taken = self.wait_for_task(testbed, url)
        testbed.worker.start()
        return f"worker {taken} took the task"


class SecondWorker(Connect):
    """Another worker of the same group."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.name = "connect-2"
        self.folder, self.log_file = settings.home / self.name, settings.home / "logs" / f"{self.name}.log"
        self._mark = f"{settings.home}:{self.name}"


def wait_running(testbed: Testbed) -> None:
    """Wait until the connector's task runs, and apply the connector while it does not."""

    def running() -> bool:
        with suppress(Failure, TimeoutError):  # an unavailable worker, or a task that has failed again
            if not testbed.relay_state().is_running:
                testbed.apply()
            return testbed.relay_state().is_running
        return False

    wait_for("the connector's task to run", running, timeout_s=RUNNING_TIMEOUT_S, poll_s=0.5)


FAULTS: list[Callable[[], Fault]] = [
    ReplicationTerminated,
    ConnectorRestarted,
    ConnectorReconfigured,
    Zombie,
    Rebalanced,
]
