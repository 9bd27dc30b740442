"""The relay: replication connections, connectors, and two workers that believe they have a task."""

from __future__ import annotations

import re
from contextlib import suppress

from outbox.base.heavy import requests
from outbox.base.wait import wait_for
from outbox.kafka import topics
from outbox.relay.connectors import Connector
from outbox_lab.soak.fault import NotFired, Strike, despite_faults, wait_or_not_fired
from outbox_lab.soak.testbed import Testbed
from outbox_lab.stack.process import Process

TASK_TIMEOUT_S = 120.0
FENCED_TIMEOUT_S = 15.0
ZOMBIE_ATTEMPTS = 4
# Materialized: else Postgres may ask the function first, for the sessions of everybody.
TERMINATE = """
WITH found AS MATERIALIZED (
    SELECT pid FROM pg_stat_replication JOIN pg_replication_slots ON active_pid = pid
     WHERE slot_name = %s AND pid <> ALL(%s)
)
SELECT pid FROM found WHERE pg_terminate_backend(pid)
"""
RUNNING_TIMEOUT_S = 240.0  # a transaction of a task that was fenced ends after a minute, and only then `apply` goes on
# As Kafka's producer and Connect's task log it: the broker has refused a record or an offset of the old task.
FENCED = re.compile(r"InvalidProducerEpochException|ProducerFencedException|fenced by another|newer producer")


def terminate_replication(strike: Strike) -> str:
    testbed = strike.testbed
    pids: dict[str, list[int]] = {one.name: [] for one in testbed.connectors}
    for _ in range(strike.chance.randint(1, 3)):
        for slot, before in pids.items():
            # One that ends slowly can be signalled twice: not one of those before.
            rows = wait_or_not_fired(
                f"another connection to read slot {slot}",
                lambda: testbed.superuser(TERMINATE, [slot, list(before)]),  # noqa: B023
                timeout_s=90,
            )
            before.append(int(rows[0][0]))
    found = (f"{', '.join(map(str, of_slot))} of slot {slot}" for slot, of_slot in pids.items())
    return f"backends {', and '.join(found)} were terminated"


def wait_running(strike: Strike) -> None:
    """Wait until the task of each connector runs, and apply a connector while it does not."""
    testbed = strike.testbed
    for connector in testbed.connectors:

        def is_running(connector: Connector = connector) -> bool:
            if not testbed.relay_state(connector).is_running:
                testbed.apply_one(connector)
            return testbed.relay_state(connector).is_running

        what = f"the task of {connector.name} to run"
        wait_for(what, despite_faults(is_running), timeout_s=RUNNING_TIMEOUT_S, poll_s=0.5)


# Two workers -------------------------------------------------------------------------------------------------------


def return_as_zombie(strike: Strike) -> str:
    """The worker may see that it has left the group before it writes: then the other one is frozen."""
    testbed = strike.testbed
    connector = strike.chance.choice(testbed.connectors)
    testbed.second_worker.start()
    workers: list[tuple[Process, str]] = [
        (testbed.worker, testbed.settings.connect_url),
        (testbed.second_worker, testbed.second_url),
    ]
    for _ in range(ZOMBIE_ATTEMPTS):
        _wait_relaying(testbed, connector)
        if _task_of(testbed, connector, workers[1][1]):
            workers.reverse()
        frozen, url = workers[0][0], workers[1][1]
        size = frozen.log_size()
        frozen.pause()
        taken = _wait_for_task(testbed, connector, url)
        frozen.resume()
        done = f"worker {taken} took the task of {connector.name} from {frozen.name}, which came back"
        if not testbed.settings.exactly_once:
            return done
        with suppress(TimeoutError):
            what = f"{frozen.name} to be fenced"
            wait_for(what, lambda: FENCED.search(frozen.log_since(size)), timeout_s=FENCED_TIMEOUT_S)  # noqa: B023
            return f"{done} and was fenced"
    raise NotFired(f"{ZOMBIE_ATTEMPTS} times, a frozen worker came back and did not write")


def rebalance(strike: Strike) -> str:
    testbed = strike.testbed
    testbed.second_worker.start()
    testbed.worker.stop()
    taken = [_wait_for_task(testbed, connector, testbed.second_url) for connector in testbed.connectors]
    testbed.worker.start()
    return f"worker {taken[0]} took {len(taken)} tasks"


def end_second_worker(strike: Strike) -> None:
    testbed = strike.testbed
    testbed.worker.resume()
    testbed.worker.start()
    testbed.second_worker.resume()
    testbed.second_worker.stop()
    wait_running(strike)


def _wait_for_task(testbed: Testbed, connector: Connector, url: str) -> str:
    """Wait until the worker with this URL has the task of a connector, and return its name."""
    what = f"the worker at {url} to have the task of {connector.name}"
    return wait_or_not_fired(what, lambda: _task_of(testbed, connector, url), timeout_s=TASK_TIMEOUT_S)


def _task_of(testbed: Testbed, connector: Connector, url: str) -> str:
    """The name of the worker with this URL, if it has the task of a connector; else empty."""
    login = testbed.settings.connect_login
    with suppress(ValueError, KeyError, requests.RequestException):
        status = requests.get(f"{url}/connectors/{connector.name}/status", auth=login, timeout=5).json()
        tasks = [task for task in status.get("tasks", []) if task["state"] == "RUNNING"]
        if tasks and tasks[0]["worker_id"].endswith(url.removeprefix("http://")):
            return str(tasks[0]["worker_id"])
    return ""


def _wait_relaying(testbed: Testbed, connector: Connector) -> None:
    """Wait until a connector relays something. Raises NotFired if it does not."""

    def records() -> int:
        return sum(sum(topics.high_watermarks(testbed.settings, name).values()) for name in connector.topics)

    before = records()
    what = f"connector {connector.name} to relay something"
    wait_or_not_fired(what, lambda: records() > before, timeout_s=TASK_TIMEOUT_S)
