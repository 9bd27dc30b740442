"""The rolling upgrade of KIP-618 under load: two workers, each disabled, then preparing, then enabled."""

from __future__ import annotations

import sys
from contextlib import suppress

import requests
from outbox.base.errors import Failure
from outbox.base.wait import wait_for
from outbox.relay import lifecycle
from outbox_lab.stack import ports

from proof.articles.chain import (
    PROGRESS_TIMEOUT_S,
    REQUEST_TIMEOUT_S,
    Chain,
    Refusal,
    Worker,
    kill,
    own_chain,
    put_config,
)
from proof.articles.experiment import Experiment, Report, Seen
from proof.articles.writer import writing

PROGRESS = 300  # events that are relayed in each step
PAUSE_S = 0.2  # between two statements: hundreds of commits a second
DISABLED, PREPARING, ENABLED = "disabled", "preparing", "enabled"


def rolling(events: int, report: Report) -> Seen:
    """Restart one worker after the other in the next mode, while events are written all the time."""
    del events  # as many as are written meanwhile
    with own_chain(report, exactly_once=False) as chain:
        chain.apply(exactly_once_support="requested")
        group = Group(chain)
        with writing(chain.settings, sys.maxsize, pause_s=PAUSE_S):
            steps = [group.step()]
            steps += [group.restart(number, PREPARING) for number in (0, 1)]
            refusal = Refusal(group.require())
            steps += [group.restart(number, ENABLED) for number in (0, 1)]
            accepted = group.require()
            steps.append(group.step("connector `required`"))
            before = _duplicates(chain)
            kill(group.owner())
            chain.wait_progress(PROGRESS)
        delivery = chain.drained()
        report(f"{refusal}")
        return Seen(
            f"{'; '.join(text for text, _ in steps)}. `required` was refused while preparing (HTTP {refusal.status}) "
            f"and accepted when enabled (HTTP {accepted.status_code}). {delivery}; "
            f"{delivery.duplicates - before:,} duplicates after the upgrade, when the task's worker was killed",
            all(is_expected for _, is_expected in steps)
            and refusal.status == requests.codes.bad_request
            and accepted.ok
            and delivery.is_complete
            and delivery.duplicates == before,
        )


class Group:
    """The two workers, the first of them the stack's."""

    def __init__(self, chain: Chain) -> None:
        self._chain = chain
        url = f"http://{ports.LOOPBACK}:{ports.choose(0)[0]}"
        second = chain.settings.replace(connect_url=url)
        self.workers = [Worker(chain.settings, "connect", DISABLED), Worker(second, "connect-2", DISABLED)]
        self.workers[1].start()

    def restart(self, number: int, mode: str) -> tuple[str, bool]:
        """Stop one worker gently, start it in another mode, and describe the step."""
        old = self.workers[number]
        old.stop()
        self.workers[number] = Worker(old.settings, old.name, mode)
        self.workers[number].start()
        return self.step()

    def step(self, what: str = "") -> tuple[str, bool]:
        """Wait until events are relayed. Returns a text, and whether the effective mode is that of the task's worker.

        ``what`` is named instead of the modes of both workers.
        """
        self._chain.wait_progress(PROGRESS)
        owner = self.owner()
        effective = lifecycle.status(owner.settings).mode.partition(" (")[0]
        modes = [worker.mode for worker in self.workers]
        has_task = f", the task on the {owner.mode} one" if len(set(modes)) > 1 else ""
        text = f"{what or ', '.join(modes)}{has_task}: {effective}"
        self._chain.report(text)
        return text, (effective == "exactly-once") is (owner.mode == ENABLED)

    def owner(self) -> Worker:
        """The worker that has the task, once it runs."""
        return wait_for("the task to run", self._owner, timeout_s=PROGRESS_TIMEOUT_S, poll_s=0.2)

    def require(self) -> requests.Response:
        """Ask for a connector that requires exactly-once; again while the group rebalances."""
        config = self._chain.config(exactly_once_support="required")

        def answer() -> tuple[requests.Response] | None:  # a tuple, because a response with an error status is false
            response = put_config(self.workers[0].settings, self._chain.connector, config)
            return None if response.status_code == requests.codes.conflict else (response,)

        return wait_for("Connect to answer", answer, timeout_s=PROGRESS_TIMEOUT_S, poll_s=0.5)[0]

    def _owner(self) -> Worker | None:
        with suppress(Failure, requests.RequestException):
            for worker in self.workers:
                url = f"{worker.settings.connect_url}/connectors/{self._chain.connector.name}/status"
                answer = requests.get(url, auth=worker.settings.connect_login, timeout=REQUEST_TIMEOUT_S)
                tasks = answer.json().get("tasks", [])
                address = worker.settings.connect_url.removeprefix("http://")
                if any(task["state"] == "RUNNING" and task["worker_id"] == address for task in tasks):
                    return worker
        return None


def _duplicates(chain: Chain) -> int:
    ids = chain.topic.read()
    return len(ids) - len(set(ids))


EXPERIMENTS = [
    Experiment(
        "rolling-upgrade",
        "two workers under load, restarted one after the other: `disabled`, `preparing`, `enabled`; then the connector "
        "gets `required`, and the task's worker is killed",
        "the mode is that of the task's worker; nothing lost, no duplicates after the upgrade",
        0,
        rolling,
    ),
]
