"""The relay: its replication connection, its connector, and two workers that believe they have the task."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from contextlib import suppress

import requests

from outbox.base.errors import Failure
from outbox.base.settings import SourceRole
from outbox.base.wait import wait_for
from outbox.relay import connectors
from outbox.soak.fault import Fault, NotFired
from outbox.soak.testbed import Testbed
from outbox.stack import ports
from outbox.stack.connect import Connect

TASK_TIMEOUT_S = 120.0
TERMINATE = """
SELECT pid FROM pg_stat_replication WHERE usename = %s AND pid <> ALL(%s) AND pg_terminate_backend(pid)
"""
READER = "SELECT active_pid FROM pg_replication_slots WHERE slot_name = %s AND active_pid IS NOT NULL"
RUNNING_TIMEOUT_S = 240.0  # a transaction of a task that was fenced ends after a minute, and only then `apply` goes on
# As Kafka's producer and Connect's task log it: the broker has refused a record or an offset of the old task.
FENCED = re.compile(r"InvalidProducerEpochException|ProducerFencedException|fenced by another|newer producer")


class ReplicationTerminated(Fault):
    """`pg_terminate_backend` on Debezium's connection, several times."""

    name = "replication-terminated"
    parts = ("connect", "postgres")
    lasts_s = (0.0, 0.0)

    def fire(self, testbed: Testbed, chance: random.Random) -> str:
        pids: list[int] = []
        for _ in range(chance.randint(1, 3)):
            pids.append(self._terminate(testbed, pids))
        return f"backends {', '.join(map(str, pids))} were terminated"

    def heal(self, testbed: Testbed) -> None:
        wait_running(testbed)

    @staticmethod
    def _terminate(testbed: Testbed, before: Sequence[int]) -> int:
        """End the connection that Debezium has now. One that ends slowly can be signalled twice: not ``before``."""
        role = testbed.settings.role_name(SourceRole.CDC)

        def terminated() -> list[tuple[int]]:
            return testbed.superuser(TERMINATE, [role, list(before)])

        try:
            [(pid,), *_] = wait_for("another replication connection", terminated, timeout_s=90)
        except TimeoutError as error:
            raise NotFired(str(error)) from error
        return int(pid)


class _Restarting(Fault):
    """A fault that Connect answers at once. It has happened once another task reads the slot."""

    parts: tuple[str, ...] = ("connect", "postgres", "kafka", "debezium-postgres", "connect-kafka")
    lasts_s: tuple[float, float] = (0.0, 0.0)

    def fire(self, testbed: Testbed, chance: random.Random) -> str:
        slot = testbed.settings.connector
        try:
            [(before,)] = wait_for("a task to read the slot", lambda: testbed.superuser(READER, [slot]), timeout_s=60)
            answer = self.ask(testbed, chance)
            if not answer.ok:
                raise NotFired(f"Connect answered {answer.status_code}: {answer.text[:300]}")

            def other() -> int | None:
                rows = testbed.superuser(READER, [slot])
                return next((int(pid) for (pid,) in rows if pid != before), None)

            after = wait_for("another task to read the slot", other, timeout_s=TASK_TIMEOUT_S)
        except TimeoutError as error:
            raise NotFired(str(error)) from error
        return f"backend {after} reads the slot, and {before} no longer does"

    def ask(self, testbed: Testbed, chance: random.Random) -> requests.Response:
        """Ask Connect for it."""
        raise NotImplementedError

    def heal(self, testbed: Testbed) -> None:
        wait_running(testbed)


class ConnectorRestarted(_Restarting):
    """Connector and task are restarted through Connect's REST interface."""

    name = "connector-restarted"

    def ask(self, testbed: Testbed, chance: random.Random) -> requests.Response:
        del chance
        settings = testbed.settings
        url = f"{settings.connect_url}/connectors/{settings.connector}/restart?includeTasks=true&onlyFailed=false"
        return requests.post(url, timeout=30)


class ConnectorReconfigured(_Restarting):
    """The connector gets another configuration, and then its own again: two other tasks."""

    name = "connector-reconfigured"
    lasts_s = (2.0, 10.0)

    def ask(self, testbed: Testbed, chance: random.Random) -> requests.Response:
        config = requests.get(self._url(testbed), timeout=30).json()
        config["max.batch.size"] = str(chance.choice([64, 256, 1024]))
        return requests.put(self._url(testbed), json=config, timeout=30)

    def heal(self, testbed: Testbed) -> None:
        """`connect apply` updates it, unless one that an operator has run meanwhile did so."""

        def applied() -> bool:
            with suppress(Failure, TimeoutError):  # the database may be broken too
                testbed.apply()
                return True
            return False

        wait_for("the connector to have its own configuration", applied, timeout_s=RUNNING_TIMEOUT_S, poll_s=1)
        own = connectors.load(testbed.settings).config
        effective = requests.get(self._url(testbed), timeout=30).json()
        if effective.get("max.batch.size") != own.get("max.batch.size"):
            raise RuntimeError(f"`connect apply` left max.batch.size at {effective.get('max.batch.size')}")

    @staticmethod
    def _url(testbed: Testbed) -> str:
        return f"{testbed.settings.connect_url}/connectors/{testbed.settings.connector}/config"


class _TwoWorkers(Fault):
    """A fault with a second worker in the group."""

    parts: tuple[str, ...] = ("connect", "kafka", "connect-kafka")
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
        self._second = Connect(settings, "connect-2")
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
    lasts_s = (0.0, 2.0)

    def fire(self, testbed: Testbed, chance: random.Random) -> str:
        del chance
        size = testbed.worker.log_size()
        testbed.worker.pause()
        taken = self.wait_for_task(testbed, self.start_second(testbed))
        testbed.worker.resume()
        if not testbed.settings.exactly_once:
            return f"worker {taken} took the task, and the first one came back"

        def fenced() -> str | None:
            found = FENCED.search(testbed.worker.log_since(size))
            return found and found[0]

        try:
            line = wait_for("the first worker to be fenced", fenced, timeout_s=TASK_TIMEOUT_S, poll_s=0.5)
        except TimeoutError as error:
            raise NotFired(f"worker {taken} took the task, and {error}") from error
        return f"worker {taken} took the task, and the first one logged {line}"


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
