"""The relay: replication connections, connectors, and two workers that believe they have a task."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from contextlib import suppress

import requests

from outbox.base.errors import Failure
from outbox.base.wait import wait_for
from outbox.kafka import topics
from outbox.relay.connectors import Connector
from outbox_lab.soak.fault import A_WHILE_S, Fault, Make, NotFired, wait_or_not_fired
from outbox_lab.soak.testbed import Testbed
from outbox_lab.stack import ports
from outbox_lab.stack.connect import Connect
from outbox_lab.stack.process import Process

TASK_TIMEOUT_S = 120.0
FENCED_TIMEOUT_S = 15.0
# Materialized: else Postgres may ask the function first, for the sessions of everybody.
TERMINATE = """
WITH found AS MATERIALIZED (
    SELECT pid FROM pg_stat_replication JOIN pg_replication_slots ON active_pid = pid
     WHERE slot_name = %s AND pid <> ALL(%s)
)
SELECT pid FROM found WHERE pg_terminate_backend(pid)
"""
READER = "SELECT active_pid FROM pg_replication_slots WHERE slot_name = %s AND active_pid IS NOT NULL"
RUNNING_TIMEOUT_S = 240.0  # a transaction of a task that was fenced ends after a minute, and only then `apply` goes on
# As Kafka's producer and Connect's task log it: the broker has refused a record or an offset of the old task.
FENCED = re.compile(r"InvalidProducerEpochException|ProducerFencedException|fenced by another|newer producer")


class ReplicationTerminated(Fault):
    """`pg_terminate_backend` on the replication connection of each connector, several times."""

    name = "replication-terminated"
    parts = ("connector",)
    needs = ("connect", "postgres")

    def fire(self, testbed: Testbed, chance: random.Random) -> str:
        pids: dict[str, list[int]] = {one.name: [] for one in testbed.connectors}
        for _ in range(chance.randint(1, 3)):
            for slot, before in pids.items():
                before.append(self._terminate(testbed, slot, before))
        found = (f"{', '.join(map(str, of_slot))} of slot {slot}" for slot, of_slot in pids.items())
        return f"backends {', and '.join(found)} were terminated"

    def heal(self, testbed: Testbed) -> None:
        wait_running(testbed)

    @staticmethod
    def _terminate(testbed: Testbed, slot: str, before: Sequence[int]) -> int:
        """End the connection that reads a slot now. One that ends slowly can be signalled twice: not ``before``."""

        def terminated() -> list[tuple[int]]:
            return testbed.superuser(TERMINATE, [slot, list(before)])

        [(pid,), *_] = wait_or_not_fired(f"another connection to read slot {slot}", terminated, timeout_s=90)
        return int(pid)


class _Restarting(Fault):
    """A fault of one connector, chosen by chance, that Connect answers at once. It has happened once another task reads
    the slot.
    """

    parts = ("connector",)
    needs = ("connect", "postgres", "kafka", "debezium-postgres", "connect-kafka")

    def fire(self, testbed: Testbed, chance: random.Random) -> str:
        connector = chance.choice(testbed.connectors)
        slot = connector.name
        [(before,)] = wait_or_not_fired(
            "a task to read the slot", lambda: testbed.superuser(READER, [slot]), timeout_s=60
        )
        answer = self.ask(testbed, connector, chance)
        if not answer.ok:
            raise NotFired(f"Connect answered {answer.status_code}: {answer.text[:300]}")

        def other() -> int | None:
            rows = testbed.superuser(READER, [slot])
            return next((int(pid) for (pid,) in rows if pid != before), None)

        after = wait_or_not_fired("another task to read the slot", other, timeout_s=TASK_TIMEOUT_S)
        return f"backend {after} reads slot {slot}, and {before} no longer does"

    def ask(self, testbed: Testbed, connector: Connector, chance: random.Random) -> requests.Response:
        """Ask Connect for it."""
        raise NotImplementedError

    def heal(self, testbed: Testbed) -> None:
        wait_running(testbed)


class ConnectorRestarted(_Restarting):
    """A connector and its task are restarted through Connect's REST interface."""

    name = "connector-restarted"

    def ask(self, testbed: Testbed, connector: Connector, _: random.Random) -> requests.Response:
        url = f"{testbed.settings.connect_url}/connectors/{connector.name}/restart?includeTasks=true&onlyFailed=false"
        return requests.post(url, auth=testbed.settings.connect_login, timeout=30)


class ConnectorReconfigured(_Restarting):
    """A connector gets another configuration, and then its own again: two other tasks."""

    name = "connector-reconfigured"
    lasts_s = A_WHILE_S

    def ask(self, testbed: Testbed, connector: Connector, chance: random.Random) -> requests.Response:
        config = self._config(testbed, connector)
        config["max.batch.size"] = str(chance.choice([64, 256, 1024]))
        return requests.put(self._url(testbed, connector), json=config, auth=testbed.settings.connect_login, timeout=30)

    def heal(self, testbed: Testbed) -> None:
        """`connect apply` updates it, unless one that an operator has run meanwhile did so."""

        def applied() -> bool:
            with suppress(Failure, TimeoutError):  # the database may be broken too
                testbed.apply()
                return True
            return False

        wait_for("the connectors to have their own configuration", applied, timeout_s=RUNNING_TIMEOUT_S, poll_s=1)
        for connector in testbed.connectors:
            effective = self._config(testbed, connector).get("max.batch.size")
            if effective != connector.config.get("max.batch.size"):
                raise RuntimeError(f"`connect apply` left max.batch.size of {connector.name} at {effective}")

    def _config(self, testbed: Testbed, connector: Connector) -> dict[str, str]:
        answer = requests.get(self._url(testbed, connector), auth=testbed.settings.connect_login, timeout=30)
        return dict(answer.json())

    @staticmethod
    def _url(testbed: Testbed, connector: Connector) -> str:
        return f"{testbed.settings.connect_url}/connectors/{connector.name}/config"


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
    def task_of(testbed: Testbed, connector: Connector, url: str) -> str:
        """The name of the worker with this URL, if it has the task of a connector; else empty."""
        login = testbed.settings.connect_login
        with suppress(ValueError, KeyError, requests.RequestException):
            status = requests.get(f"{url}/connectors/{connector.name}/status", auth=login, timeout=5).json()
            tasks = [task for task in status.get("tasks", []) if task["state"] == "RUNNING"]
            if tasks and tasks[0]["worker_id"].endswith(url.removeprefix("http://")):
                return str(tasks[0]["worker_id"])
        return ""

    def wait_for_task(self, testbed: Testbed, connector: Connector, url: str) -> str:
        """Wait until the worker with this URL has the task of a connector, and return its name."""
        what = f"the worker at {url} to have the task of {connector.name}"
        return wait_or_not_fired(what, lambda: self.task_of(testbed, connector, url), timeout_s=TASK_TIMEOUT_S)


class Zombie(_TwoWorkers):
    """A worker is frozen until another worker has its task. Then it returns, and must be fenced."""

    name = "connect-zombie"
    needs = (*_TwoWorkers.needs, "postgres", "debezium-postgres")
    lasts_s = (0.0, 2.0)
    attempts = 4

    def fire(self, testbed: Testbed, chance: random.Random) -> str:
        """The worker may see that it has left the group before it writes: then the other one is frozen."""
        connector = chance.choice(testbed.connectors)
        workers: list[tuple[Process, str]] = [
            (testbed.worker, testbed.settings.connect_url),
            self.start_second(testbed),
        ]
        for _ in range(self.attempts):
            wait_relaying(testbed, connector)
            if self.task_of(testbed, connector, workers[1][1]):
                workers.reverse()
            frozen, url = workers[0][0], workers[1][1]
            size = frozen.log_size()
            frozen.pause()
            taken = self.wait_for_task(testbed, connector, url)
            frozen.resume()
            done = f"worker {taken} took the task of {connector.name} from {frozen.name}, which came back"
            if not testbed.settings.exactly_once:
                return done
            if was_fenced(frozen, size):
                return f"{done} and was fenced"
        raise NotFired(f"{self.attempts} times, a frozen worker came back and did not write")


class Rebalanced(_TwoWorkers):
    """A second worker joins, the first leaves and returns: each task moves there and back."""

    name = "connect-rebalanced"

    def fire(self, testbed: Testbed, _: random.Random) -> str:
        url = self.start_second(testbed)[1]
        testbed.worker.stop()
        taken = [self.wait_for_task(testbed, connector, url) for connector in testbed.connectors]
        testbed.worker.start()
        return f"worker {taken[0]} took {len(taken)} tasks"


def was_fenced(worker: Process, size: int) -> bool:
    """Whether a worker logs that it was fenced, behind the first bytes of its log."""
    with suppress(TimeoutError):
        what = f"{worker.name} to be fenced"
        wait_for(what, lambda: FENCED.search(worker.log_since(size)), timeout_s=FENCED_TIMEOUT_S)
        return True
    return False


def wait_relaying(testbed: Testbed, connector: Connector) -> None:
    """Wait until a connector relays something. Raises NotFired if it does not."""

    def records() -> int:
        return sum(sum(topics.high_watermarks(testbed.settings, name).values()) for name in connector.topics)

    before = records()
    what = f"connector {connector.name} to relay something"
    wait_or_not_fired(what, lambda: records() > before, timeout_s=TASK_TIMEOUT_S)


def wait_running(testbed: Testbed) -> None:
    """Wait until the task of each connector runs, and apply a connector while it does not."""
    for connector in testbed.connectors:

        def running(connector: Connector = connector) -> bool:
            with suppress(Failure, TimeoutError):  # an unavailable worker, or a task that has failed again
                if not testbed.relay_state(connector).is_running:
                    testbed.apply_one(connector)
                return testbed.relay_state(connector).is_running
            return False

        wait_for(f"the task of {connector.name} to run", running, timeout_s=RUNNING_TIMEOUT_S, poll_s=0.5)


FAULTS: list[Make] = [ReplicationTerminated, ConnectorRestarted, ConnectorReconfigured, Zombie, Rebalanced]
