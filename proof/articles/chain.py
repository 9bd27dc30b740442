"""The chain of an experiment: a stack of its own, a connector, and the topic read as a read_committed reader does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import requests
from confluent_kafka import Message
from outbox.base import project
from outbox.base.settings import Settings, SourceRole
from outbox.base.wait import WaitTimeoutError, wait_for
from outbox.kafka import records, topics
from outbox.migrations.migrate import migrate
from outbox.relay import arrivals, connectors, lifecycle, slot
from outbox.relay.connectors import Connector
from outbox_lab.stack.connect import Connect
from outbox_lab.stack.postgres import Postgres
from outbox_lab.stack.process import Process
from outbox_lab.stack.stack import Stack
from outbox_lab.testing.fixtures.stack import private_stack
from outbox_lab.testing.helpers import query
from outbox_lab.testing.homes import Homes

from proof.articles.experiment import NotFired, Report
from proof.articles.history import Delivery, compare

PROGRESS_TIMEOUT_S = 180.0  # a connector that lost its connection tries again after ten seconds
DRAIN_TIMEOUT_S = 240.0
REQUEST_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Source:
    """A table and the connector that captures it."""

    kind: str  # of the connector: the name of its file
    written: str  # SELECT of the ids of its rows
    id_of: Callable[[Message], str]  # the same id in a record


OUTBOX = Source(
    "outbox",
    "SELECT id::text FROM outbox WHERE aggregatetype = 'balance'",
    lambda message: str(arrivals.header_id(message)),
)


@contextmanager
def own_chain(report: Report, *, exactly_once: bool, source: Source = OUTBOX) -> Iterator[Chain]:
    """A stack on free ports with migrated databases, and no connector yet; in the end nothing is left of it."""
    homes = Homes(project.current().home / "experiments")
    is_done = False
    try:
        stack = private_stack(homes.new("stack"), exactly_once=exactly_once)
        stack.up(report=report)
        migrate(stack.settings)
        yield Chain(stack, source, report)
        is_done = True
    finally:
        homes.close(keep_logs=not is_done)


class Chain:
    """A stack whose connector relays a table to a topic; of the outbox it is the topic of the balances."""

    def __init__(self, stack: Stack, source: Source, report: Report) -> None:
        self.stack = stack
        self.settings = stack.settings
        self.report = report
        self.connector = connectors.load(self.settings, source.kind)
        name = f"{self.settings.topic_prefix}.balance" if self.connector.is_outbox else self.connector.topic
        self.topic = Topic(self.settings, name, source.id_of)
        self._source = source

    @property
    def worker(self) -> Process:
        """The Connect worker."""
        return self.stack.part("connect")

    def config(self, **changed: str) -> dict[str, Any]:
        """The connector's configuration, with some properties changed; in their names `_` stands for a dot."""
        return {**self.connector.config, **{name.replace("_", "."): value for name, value in changed.items()}}

    def apply(self, **changed: str) -> None:
        """Apply the connector with some properties changed, and wait until its task runs."""
        lifecycle.apply(self.settings, replace(self.connector, config=self.config(**changed)))
        self.report(f"connector applied: {self.mode()}")

    def mode(self) -> str:
        """The effective mode between Debezium and Kafka, and what the connector asks for."""
        status = lifecycle.status(self.settings, self.connector)
        return f"{status.mode}, exactly.once.support={status.connector_exactly_once}"

    def written(self) -> list[str]:
        """The ids of the rows in the table."""
        return [row_id for (row_id,) in query(self.settings, self._source.written, SourceRole.CDC)]

    def wait_progress(self, events: int) -> None:
        """Wait until so many more records are on the topic."""
        due = len(self.topic.read()) + events
        wait_for(
            f"{events} more events on the topic",
            lambda: len(self.topic.read()) >= due,
            timeout_s=PROGRESS_TIMEOUT_S,
            poll_s=0.1,
        )

    def drained(self) -> Delivery:
        """Wait until each row of the table is on the topic, and compare. One that does not come is lost."""
        written = set(self.written())
        with suppress(WaitTimeoutError):
            wait_for(
                "the events on the topic",
                lambda: written <= set(self.topic.read()),
                timeout_s=DRAIN_TIMEOUT_S,
                poll_s=0.5,
            )
        return compare(written, self.topic.ids)

    def terminate_replication(self) -> int:
        """Terminate Debezium's backend, wait until another one reads the slot, and return the process id of the first.

        Raises NotFired unless the server has terminated it.
        """
        first = wait_for("a replication connection", self._reader, timeout_s=PROGRESS_TIMEOUT_S)
        answer = Postgres(self.settings).psql(f"SELECT pg_terminate_backend({first})").stdout.strip()
        if answer != "t":
            raise NotFired(f"pg_terminate_backend({first}) answered {answer}")
        wait_for(
            "another replication connection",
            lambda: self._reader() not in (None, first),
            timeout_s=PROGRESS_TIMEOUT_S,
            poll_s=0.2,
        )
        return first

    def kill_worker(self) -> None:
        """Kill the worker (SIGKILL). Raises NotFired if it did not run."""
        kill(self.worker)

    def _reader(self) -> int | None:
        found = slot.read(self.settings, self.connector)
        return None if found is None else found.active_pid


class Topic:
    """The records of a topic in the order of each partition, read on from where it was."""

    def __init__(self, settings: Settings, name: str, id_of: Callable[[Message], str]) -> None:
        self._settings = settings
        self._name = name
        self._id_of = id_of
        self._next: Mapping[int, int] = {}
        self.ids: list[str] = []

    def read(self) -> list[str]:
        """The ids in all records committed by now."""
        end = topics.last_stable_offsets(self._settings, self._name)
        within = {partition: (self._next.get(partition, 0), offset) for partition, offset in end.items()}
        self.ids += [self._id_of(message) for message in records.read(self._settings, self._name, within)]
        self._next = end
        return self.ids

    @property
    def offsets(self) -> int:
        """How many offsets were read: those of the records and those of the markers of transactions."""
        return sum(self._next.values())


class Worker(Connect):
    """A Connect worker in one of the three modes of a rolling upgrade."""

    def __init__(self, settings: Settings, name: str, mode: str) -> None:
        super().__init__(settings, name)
        self.settings = settings
        self.mode = mode

    def env(self) -> Mapping[str, str]:
        """As in any stack, but for the mode."""
        return {**super().env(), "OUTBOX_CONNECT_EXACTLY_ONCE": self.mode}


def kill(worker: Process) -> None:
    """Kill a worker (SIGKILL). Raises NotFired if it did not run."""
    if not worker.is_running():
        raise NotFired(f"{worker.name} did not run")
    worker.kill()


class Refusal:
    """Connect's answer to a request that it should refuse."""

    def __init__(self, response: requests.Response) -> None:
        self.status = response.status_code
        message = str(response.json().get("message", response.text))
        # Connect counts the errors, and adds where one can ask for them again.
        errors = message.rpartition("error(s):")[2].partition("You can also find")[0]
        self.message = " ".join(errors.split())

    def __str__(self) -> str:
        return f"HTTP {self.status}: {self.message}"


def put_config(settings: Settings, connector: Connector, config: Mapping[str, Any]) -> requests.Response:
    """Ask Connect for a connector with this configuration, and return its answer."""
    url = f"{settings.connect_url}/connectors/{connector.name}/config"
    return requests.put(url, json=dict(config), auth=settings.connect_login, timeout=REQUEST_TIMEOUT_S)
