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
from outbox.events import catalog
from outbox.kafka import topics
from outbox.relay import connectors
from outbox.soak.fault import Fault, NotFired, wait_or_not_fired
from outbox.soak.testbed import Testbed
from outbox.stack import ports
from outbox.stack.connect import Connect
from outbox.stack.process import Process

TASK_TIMEOUT_S = 120.0
FENCED_TIMEOUT_S = 15.0
# Materialized: else Postgres may ask the function first, for the sessions of everybody.
TERMINATE = """
WITH found AS MATERIALIZED (SELECT pid FROM pg_stat_replication WHERE usename = %s AND pid <> ALL(%s))
SELECT pid FROM found WHERE pg_terminate_backend(pid)
"""
READER = "SELECT active_pid FROM pg_replication_slots WHERE slot_name = %s AND active_pid IS NOT NULL"
RUNNING_TIMEOUT_S = 240.0  # a transaction of a task that was fenced ends after a minute, and only then `apply` goes on
# As Kafka's producer and Connect's task log it: the broker has refused a record or an offset of the old task.
FENCED = re.compile(r"InvalidProducerEpochException|ProducerFencedException|fenced by another|newer producer")


class ReplicationTerminated(Fault):
    """`pg_terminate_backend` on Debezium's connection, several times."""

    name = "replication-terminated"
    parts = ("connector",)
    needs = ("connect", "postgres")
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

        [(pid,), *_] = wait_or_not_fired("another replication connection", terminated, timeout_s=90)
        return int(pid)


class _Restarting(Fault):
    """A fault that Connect answers at once. It has happened once another task reads the slot."""

    parts = ("connector",)
    needs = ("connect", "postgres", "kafka", "debezium-postgres", "connect-kafka")
    lasts_s: tuple[float, float] = (0.0, 0.0)

    def fire(self, testbed: Testbed, chance: random.Random) -> str:
        slot = testbed.settings.connector
        [(before,)] = wait_or_not_fired(
            "a task to read the slot", lambda: testbed.superuser(READER, [slot]), timeout_s=60
        )
        answer = self.ask(testbed, chance)
        if not answer.ok:
            raise NotFired(f"Connect answered {answer.status_code}: {answer.text[:300]}")

        def other() -> int | None:
            rows = testbed.superuser(READER, [slot])
            return next((int(pid) for (pid,) in rows if pid != before), None)

        after = wait_or_not_fired("another task to read the slot", other, timeout_s=TASK_TIMEOUT_S)
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

    parts = ("connect", "connector")
    needs: tuple[str, ...] = ("kafka", "connect-kafka")
    lasts_s = (2.0, 5.0)

    def __init__(self) -> None:
        self._second: Connect | None = None

    def heal(self, testbed: Testbed) -> None:
        testbed.worker.resume()
        testbed.worker.start()
        if self._second is not None:
            self._second.resume()
            self._second.stop()
        wait_running(testbed)

    def start_second(self, testbed: Testbed) -> tuple[Connect, str]:
        """Start the second worker, and return it with its URL."""
        url = f"http://{ports.LOOPBACK}:{ports.choose(0)[0]}"
        settings = testbed.stack.through("connect-kafka", "debezium-postgres").model_copy(update={"connect_url": url})
        self._second = Connect(settings, "connect-2")
        self._second.start()
        return self._second, url

    @staticmethod
    def task_of(testbed: Testbed, url: str) -> str:
        """The name of the worker with this URL, if it has the task; else empty."""
        with suppress(ValueError, KeyError, requests.RequestException):
            status = requests.get(f"{url}/connectors/{testbed.settings.connector}/status", timeout=5).json()
            tasks = [task for task in status.get("tasks", []) if task["state"] == "RUNNING"]
            if tasks and tasks[0]["worker_id"].endswith(url.removeprefix("http://")):
                return str(tasks[0]["worker_id"])
        return ""

    def wait_for_task(self, testbed: Testbed, url: str) -> str:
        """Wait until the worker with this URL has the task, and return its name."""
        what = f"the worker at {url} to have the task"
        return wait_or_not_fired(what, lambda: self.task_of(testbed, url), timeout_s=TASK_TIMEOUT_S)


class Zombie(_TwoWorkers):
    """The worker is frozen until another worker has its task. Then it returns, and must be fenced."""

    name = "connect-zombie"
    needs = (*_TwoWorkers.needs, "postgres", "debezium-postgres")
    lasts_s = (0.0, 2.0)
    attempts = 4

    def fire(self, testbed: Testbed, chance: random.Random) -> str:
        """The worker may see that it has left the group before it writes: then the other one is frozen."""
        del chance
        workers: list[tuple[Process, str]] = [
            (testbed.worker, testbed.settings.connect_url),
            self.start_second(testbed),
        ]
        for _ in range(self.attempts):
            wait_relaying(testbed)
            if self.task_of(testbed, workers[1][1]):
                workers.reverse()
            frozen, url = workers[0][0], workers[1][1]
            size = frozen.log_size()
            frozen.pause()
            taken = self.wait_for_task(testbed, url)
            frozen.resume()
            if not testbed.settings.exactly_once:
                return f"worker {taken} took the task of {frozen.name}, which came back"
            if was_fenced(frozen, size):
                return f"worker {taken} took the task of {frozen.name}, which came back and was fenced"
        raise NotFired(f"{self.attempts} times, a frozen worker came back and did not write")


class Rebalanced(_TwoWorkers):
    """A second worker joins, the first leaves and returns: the task moves there and back."""

    name = "connect-rebalanced"

    def fire(self, testbed: Testbed, chance: random.Random) -> str:
        del chance
        _, url = self.start_second(testbed)
        testbed.worker.stop()
        taken = self.wait_for_task(testbed, url)
        testbed.worker.start()
        return f"worker {taken} took the task"


def was_fenced(worker: Process, size: int) -> bool:
    """Whether a worker logs that it was fenced, behind the first bytes of its log."""
    with suppress(TimeoutError):
        what = f"{worker.name} to be fenced"
        wait_for(what, lambda: FENCED.search(worker.log_since(size)), timeout_s=FENCED_TIMEOUT_S)
        return True
    return False


def wait_relaying(testbed: Testbed) -> None:
    """Wait until an event is relayed. Raises NotFired if none is."""
    settings = testbed.settings

    def records() -> int:
        return sum(sum(topics.high_watermarks(settings, name).values()) for name in catalog.of(settings).topics)

    before = records()
    wait_or_not_fired("an event to be relayed", lambda: records() > before, timeout_s=TASK_TIMEOUT_S)


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
