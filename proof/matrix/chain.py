"""The chain that is measured: a stack of its own, both connectors, and the sinks of all strategies in one process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from outbox.audit import check
from outbox.audit.report import Report
from outbox.base import database
from outbox.base.database import connect
from outbox.base.settings import Settings, SinkRole, SourceRole
from outbox.base.wait import wait_for
from outbox.kafka import topics
from outbox.migrations.migrate import migrate
from outbox.relay import connectors, lifecycle
from outbox.relay.connectors import Connector
from outbox.sink import discovery
from outbox.sink.remembering.positions import checkpoint_folder, checkpoint_uri
from outbox_lab.stack.command import SinkProcess
from outbox_lab.stack.process import Process
from outbox_lab.stack.stack import Stack
from outbox_lab.testing.fixtures.stack import private_stack

from proof.matrix import topic_log
from proof.matrix.topic_log import Offsets, Record

START_TIMEOUT_S = 300.0
SETTLE_TIMEOUT_S = 300.0
# The sink that shows each strategy. All of them compute the balance of each account.
SINKS: Mapping[str, str] = MappingProxyType(
    {
        "dedup": "balances",
        "merge": "balances-merge",
        "versions": "balances-versions",
        "upsert": "balances-upsert",
        "lakehouse": "lakehouse",
        "changes": "changes",
        "offsets": "balances-offsets",
        "offset-log": "balances-offset-log",
        "naive": "balances-naive",
    }
)
EVENTS = "SELECT id::text FROM outbox WHERE aggregatetype = 'balance'"
NEWEST = "SELECT id::text || ' ' || version FROM accounts"
POSITIONS = "SELECT sink, partition, next_offset FROM positions"
GENERATION = "SELECT generation FROM sinks WHERE name = %s"
HOLD = "SELECT FROM positions WHERE sink = ANY(%s) FOR UPDATE"
WAITING = "SELECT count(*) FROM pg_stat_activity WHERE %s = ANY(pg_blocking_pids(pid))"


class Chain:
    """Everything that runs. The owner of its home ends it."""

    def __init__(self, home: Path, *, exactly_once: bool) -> None:
        self._stack = private_stack(home, exactly_once=exactly_once)
        self.exactly_once = exactly_once
        self.sinks: Sequence[str] = list(SINKS.values())
        self.positions_at_start: Mapping[str, Offsets] = {}  # when the process of the sinks was started last

    @property
    def settings(self) -> Settings:
        """How to reach it."""
        return self._stack.settings

    @property
    def connectors(self) -> Sequence[Connector]:
        """The connectors of the outbox and of the table `accounts`, as the mode needs them."""
        return [connectors.load(self.settings), connectors.load(self.settings, "changes")]

    def start(self) -> None:
        """Start every part, on empty data."""
        self._stack.up()
        migrate(self.settings)
        for connector in self.connectors:
            lifecycle.apply(self.settings, connector)
        self.topics = {sink: discovery.chosen(self.settings, sink).topics[0] for sink in self.sinks}
        self.process = SinkProcess("sinks", self.settings, ["sink", *self.sinks])
        self.process.start_timeout_s = START_TIMEOUT_S
        self.start_sinks()

    def start_sinks(self) -> None:
        """Start the process of the sinks, which has ended."""
        self.positions_at_start = self.positions()
        self.process.start()

    def switch(self, *, exactly_once: bool) -> None:
        """Restart the worker in the other mode, and apply the connectors."""
        self.exactly_once = exactly_once
        self._stack = Stack(self.settings.replace(exactly_once=exactly_once))
        self._stack.up(["connect"])
        for connector in self.connectors:
            lifecycle.apply(self.settings, connector)

    @property
    def worker(self) -> Process:
        """The Connect worker."""
        return self._stack.part("connect")

    def start_worker(self) -> None:
        """Start the worker again. It knows its connectors."""
        self._stack.up(["connect"])

    # Waits ------------------------------------------------------------------------------------------------------------

    def wait_relayed(self) -> None:
        """Wait until the topics have every event, and the newest state of each account."""
        events, states = self._source(EVENTS), self._source(NEWEST)

        def arrived() -> bool:
            of_events, of_states = (self.log(self.topics[sink]) for sink in ("balances", "changes"))
            return events <= {one.identity for one in of_events} and states <= {one.identity for one in of_states}

        wait_for("the events to be relayed", arrived, timeout_s=SETTLE_TIMEOUT_S, poll_s=0.2)

    def wait_applied(self) -> None:
        """Wait until every sink has processed every record of its topic."""
        ends = {topic: topics.last_stable_offsets(self.settings, topic) for topic in {*self.topics.values()}}

        def applied() -> bool:
            reached = self.positions()
            return all(
                reached.get(sink, {}).get(partition, 0) >= offset
                for sink, topic in self.topics.items()
                for partition, offset in ends[topic].items()
            )

        wait_for("the sinks to catch up", applied, timeout_s=SETTLE_TIMEOUT_S, needs=self.process.require_running)

    def check(self) -> Report:
        """`outbox check`, once nothing is in flight."""
        return check.check_settled(self.settings, SETTLE_TIMEOUT_S, needs=self.process.require_running)

    # Look-ups ---------------------------------------------------------------------------------------------------------

    def log(self, topic: str) -> list[Record]:
        """The records of a topic."""
        return topic_log.read(self.settings, topic)

    def positions(self) -> dict[str, dict[int, int]]:
        """By sink and partition, the next offset in the sink database."""
        found: dict[str, dict[int, int]] = {}
        for sink, partition, offset in self.query(POSITIONS):
            found.setdefault(sink, {})[partition] = offset
        return found

    def checkpoint(self, sink: str) -> Path:
        """The folder of a sink's checkpoint."""
        [(generation,)] = self.query(GENERATION, [sink])
        folder = checkpoint_folder(checkpoint_uri(self.settings, sink, generation))
        assert folder is not None, "the stack keeps its checkpoints on this machine"  # noqa: S101
        return folder

    def query(self, sql: str, values: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """The rows of a query in the sink database."""
        return database.query(self.settings, SinkRole.AUDITOR, sql, values)

    def _source(self, sql: str) -> set[str]:
        return {text for (text,) in database.query(self.settings, SourceRole.OWNER, sql)}

    @contextmanager
    def holding_positions(self) -> Iterator[None]:
        """Lock the positions of every sink, and return once each sink waits for them at the end of its batch. They are
        released at the end of the block.
        """
        with closing(connect(self.settings, SinkRole.WRITER)) as holder, holder.cursor() as cursor:
            cursor.execute(HOLD, [[*self.sinks]])
            own = holder.info.backend_pid
            self.process.resume()
            wait_for(
                "each sink to wait at the end of its batch",
                lambda: self.query(WAITING, [own]) == [(len(self.sinks),)],
                timeout_s=50,  # after a minute a sink would give up
                needs=self.process.require_running,
            )
            yield
            holder.rollback()
