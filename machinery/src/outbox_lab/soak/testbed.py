"""The chain that is soaked: an embedded stack of its own, with a proxy on each link between two parts."""

from __future__ import annotations

import json
import random
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import cached_property, partial
from typing import Any

import psycopg2

from outbox.base import envfile
from outbox.base.database import query
from outbox.base.errors import Failure
from outbox.base.settings import SCRAM, Role, Settings, SourceRole
from outbox.base.terminal import Progress
from outbox.migrations.migrate import migrate
from outbox.relay import connectors, lifecycle
from outbox.relay.connectors import Connector
from outbox.relay.rest import Rest, State
from outbox.sink import discovery
from outbox.sink.spec import SinkSpec
from outbox_lab.soak import captures, operator
from outbox_lab.soak.checked import Checked, of_report
from outbox_lab.soak.disk import Disk
from outbox_lab.soak.domain import Refusal
from outbox_lab.soak.foreign import ForeignEvent
from outbox_lab.soak.operator import Done
from outbox_lab.soak.proxy import Proxy
from outbox_lab.soak.released import ReleasedService, ReleasedSinks
from outbox_lab.soak.releases import OlderRelease
from outbox_lab.soak.seen import RowChange, TopicEvent
from outbox_lab.stack import ports
from outbox_lab.stack.command import Command
from outbox_lab.stack.connect import Connect
from outbox_lab.stack.kafka import Kafka
from outbox_lab.stack.process import Process
from outbox_lab.stack.stack import Stack, quiet
from outbox_lab.walkthrough.processes import SinkProcess

Forge = Callable[[random.Random], ForeignEvent]
LINKS = ("client-service", "service-postgres", "debezium-postgres", "connect-kafka", "sinks-kafka", "sinks-postgres")
PARTS = ("postgres", "kafka", "connect", "connector", "service", "sinks", "cluster", "outbox-ids", *LINKS)
WORKERS = 2  # of the Spark cluster: the other one goes on with what a killed one had
# Spark's own REST interface says which tasks run. It keeps little of what has ended.
CLUSTER_PROPERTIES = """\
spark.ui.enabled                 true
spark.ui.port                    {port}
spark.ui.retainedJobs            100
spark.ui.retainedStages          100
spark.sql.ui.retainedExecutions  10
"""
CLUSTER_DRIVER_MEMORY = "512m"
# What is between the slot of a captured table and the stored offset is unknown. A snapshot is the one way to go on.
SLOT_AHEAD = {"slot-ahead", "slot-missing", "slot-released"}
# Ten sinks on a few cores, each with a batch for every two events, would leave none for Spark's start after a fault.
TRIGGER_INTERVAL_MS = 2000
MERGE_INTERVAL_MS = 5000  # on the cluster, where a batch of a few events costs as much as one of thousands
# The many short waits of a worker that is fast cost half a core, which a soak needs for what its faults do.
WAITS_MS = {"connector_poll_interval_ms": 50, "connect_fetch_max_wait_ms": 200}
IN_DRIVER = "local[2]"  # the master of sinks that use no cluster; without one they would use that of the stack


class LinkedKafka(Kafka):
    """A broker with a listener for each link to it. What it tells clients of the link leads through the proxy again."""

    def __init__(self, settings: Settings, links: Mapping[str, Proxy]) -> None:
        super().__init__(settings)
        self._links = {name.replace("-", "").upper(): proxy for name, proxy in links.items()}
        self.listeners = (*self.listeners, *self._links)

    def properties(self) -> Mapping[str, str]:
        """The properties of the stack's broker, and the listeners."""
        given = dict(super().properties())
        for listener, proxy in self._links.items():
            given["listeners"] += f",{listener}://{ports.LOOPBACK}:{proxy.target_port}"
            given["advertised.listeners"] += f",{listener}://{ports.LOOPBACK}:{proxy.port}"
        return given


class LinkedStack(Stack):
    """A stack whose worker reaches its broker through a link."""

    links: Mapping[str, Proxy] = {}

    @property
    def settings(self) -> Settings:
        """The settings of the stack. Its cluster is for one process of sinks alone (`on_cluster`)."""
        return super().settings.model_copy(update={"spark_master": IN_DRIVER, **WAITS_MS})

    def on_cluster(self, settings: Settings) -> Settings:
        """The settings of sinks whose tasks run on the cluster, and whose driver says what runs there."""
        own = {
            "spark_master": super().settings.spark_master,
            "spark_properties": self.home / "clustered.properties",
            "sink_driver_memory": CLUSTER_DRIVER_MEMORY,
            "sink_trigger_interval_ms": MERGE_INTERVAL_MS,
        }
        return settings.model_copy(update=own)

    def start_cluster(self, report: Progress) -> None:
        """Start a Spark cluster of this host. Its workers need not be ready: sinks wait for them."""
        self.up(["spark-master"], workers=WORKERS, report=report)
        for number in range(WORKERS):
            self.part(f"spark-worker-{number + 1}").spawn()
        shared = self.settings.stack_spark_properties.read_text()
        own = CLUSTER_PROPERTIES.format(port=ports.choose(0)[0])
        envfile.write_private(self.home / "clustered.properties", shared + own)

    def part(self, name: str) -> Process:
        """As in any stack, but for the links."""
        if name == "kafka" and self.links:
            return LinkedKafka(self.settings, {name: self.links[name] for name in ("connect-kafka", "sinks-kafka")})
        if name == "connect" and self.links:
            return Connect(self.through("connect-kafka", "debezium-postgres"))
        return super().part(name)

    def through(self, *names: str) -> Settings:
        """The settings of a part that uses these links."""
        changed: dict[str, object] = {}
        for name in names:
            port = self.links[name].port
            match name.rpartition("-")[2]:
                case "kafka":
                    changed["kafka_bootstrap"] = f"{ports.LOOPBACK}:{port}"
                case "postgres":
                    database = "sink_db_port" if name.startswith("sinks") else "source_db_port"
                    changed[database] = port
                case _:
                    changed["service_port"] = port
        return self.settings.model_copy(update=changed)


class ClusteredSinks(ReleasedSinks):
    """Sinks whose tasks run on the cluster."""

    @property
    def driver_properties(self) -> str:
        """With the port and the secret of Spark's REST interface, which says which tasks run."""
        file = self._settings.spark_properties
        return file.read_text() if file else ""


class Testbed:
    """Everything that runs, and what faults do to it.

    Faults in different threads break different parts: each holds the parts that it breaks (`holding`).
    """

    def __init__(
        self,
        settings: Settings,
        sinks: Sequence[Sequence[str]],
        refusals: Mapping[str, Refusal] | None = None,
        clustered: Sequence[str] = (),
        *,
        forge: Forge | None = None,
        older: OlderRelease | None = None,
    ) -> None:
        """``sinks``: the sinks of each process. ``clustered``: those of one more, whose tasks run on a cluster."""
        self.stack = LinkedStack(settings)
        self.refusals = refusals or {}  # of the domain, by sink
        self.forge = forge  # of the domain, if it has one: makes a foreign event
        self.foreign: list[ForeignEvent] = []  # those that a fault has sent, or is about to send
        self.dropped: list[TopicEvent | RowChange] = []  # by topics that a fault has shortened, foreign events too
        self.may_hang = False  # a broker was killed, and may have left a transaction open (`outbox.relay.offsets`)
        self.released: Counter[str] = Counter()  # by connector, how many were ended; their events are on topics twice
        self.older = older  # of the domain, if it has one
        self.checks: list[Checked] = []  # what `check` has found
        self.disks: dict[str, Disk] = {}  # by part, that of its data, if it has one of its own
        self._groups = [*sinks, clustered] if clustered else sinks
        self._has_cluster = bool(clustered)
        self._locks = {part: threading.Lock() for part in PARTS}

    @property
    def settings(self) -> Settings:
        """How to reach it without the proxies: for those who look, not for those who work."""
        return self.stack.settings

    @property
    def links(self) -> Mapping[str, Proxy]:
        """The proxies by link."""
        return self.stack.links

    @cached_property
    def worker(self) -> Process:
        """The Connect worker."""
        return self.stack.part("connect")

    @cached_property
    def service(self) -> ReleasedService:
        """The service."""
        return ReleasedService("service", self.stack.through("service-postgres"), ["serve"])

    @cached_property
    def sinks(self) -> Sequence[ReleasedSinks]:
        """The processes of the sinks."""
        settings = self._settings_of_sinks()
        alone = self._groups[:-1] if self._has_cluster else self._groups
        made = [ReleasedSinks(f"sinks-{number}", settings, ["sink", *names]) for number, names in enumerate(alone)]
        return [*made, self.clustered] if self.clustered else made

    @cached_property
    def clustered(self) -> ClusteredSinks | None:
        """The process of sinks whose tasks run on the cluster, if the domain has one."""
        if not self._has_cluster:
            return None
        settings = self.stack.on_cluster(self._settings_of_sinks())
        return ClusteredSinks(f"sinks-{len(self._groups) - 1}", settings, ["sink", *self._groups[-1]])

    def _settings_of_sinks(self) -> Settings:
        through = self.stack.through("sinks-kafka", "sinks-postgres")
        return through.model_copy(update={"sink_trigger_interval_ms": TRIGGER_INTERVAL_MS})

    @property
    def cluster(self) -> Sequence[Process]:
        """The processes of the Spark cluster: its master, then its workers."""
        return [self.stack.part(name) for name in self.stack.parts if name.startswith("spark-")]

    def names_of(self, process: SinkProcess) -> Sequence[str]:
        """The sinks of a process."""
        return self._groups[self.sinks.index(process)]

    def process_of(self, sink: str) -> SinkProcess:
        """The process of a sink."""
        return next(one for one in self.sinks if sink in self.names_of(one))

    @property
    def sink_names(self) -> Sequence[str]:
        """All sinks."""
        return [name for group in self._groups for name in group]

    @property
    def sink_specs(self) -> Sequence[SinkSpec]:
        """What the project declares of them."""
        known = discovery.sinks(self.settings) if self.sink_names else {}
        return [known[name] for name in self.sink_names]

    def readers(self, topic: str) -> Sequence[SinkSpec]:
        """The sinks that read a topic."""
        return [one for one in self.sink_specs if topic in one.topics]

    @cached_property
    def captures(self) -> Sequence[Connector]:
        """The connectors of the captured tables that a sink reads."""
        return captures.read_by(self.settings, self.sink_specs)

    @property
    def connectors(self) -> Sequence[Connector]:
        """All that it needs: that of the outbox, and those of captured tables."""
        return [connectors.load(self.settings), *self.captures]

    def start(self, report: Progress = quiet) -> None:
        """Start every part and the relay, on empty data."""
        self.stack.up(["postgres"], report=report)  # which chooses all ports
        settings = self.settings
        postgres, service = settings.source_db_port, settings.service_port
        kafka = ports.choose(0, 0)
        targets = dict(zip(LINKS, (service, postgres, postgres, *kafka, postgres), strict=True))
        self.stack.links = {name: Proxy(name, port) for name, port in targets.items()}
        self.stack.up(["kafka", "connect"], report=report)
        migrate(settings)
        self.apply()
        if self._has_cluster:
            self.stack.start_cluster(report)
        self.service.spawn()
        for sink in self.sinks:
            sink.spawn()
        parts: list[Process] = [self.service, *self.cluster, *self.sinks]
        for process in parts:
            process.wait_ready()
            report(f"{process.name}: ready")

    def apply(self) -> str:
        """Apply every connector. Returns what was done."""
        may_hang, self.may_hang = self.may_hang, False  # before: a broker may be killed meanwhile
        try:
            return ", ".join(self.apply_one(connector) for connector in self.connectors)
        except BaseException:
            self.may_hang |= may_hang
            raise

    def apply_one(self, connector: Connector) -> str:
        """Apply a connector, which reaches the database through its link. Returns what was done."""
        settings = self.stack.through("debezium-postgres")
        own = connectors.load(settings, connector.kind)
        on_release = partial(self.released.update, [connector.kind])
        try:
            return lifecycle.apply(settings, own, on_release)
        except Failure as failure:
            # Without exactly-once Debezium confirms changes to the slot before Connect has stored their offset.
            if failure.code not in SLOT_AHEAD or settings.exactly_once or connector.is_outbox:
                raise
            lifecycle.remove(settings, own, drop_slot=True)
            return lifecycle.apply(settings, own, on_release)

    def relay_state(self, connector: Connector) -> State:
        """The states of a connector and its task. Raises Failure if Connect is unavailable."""
        return Rest(self.settings, connector).state()

    @contextmanager
    def holding(self, parts: Collection[str]) -> Iterator[None]:
        """Wait until no other fault breaks one of these parts, or needs it, and keep others from doing so."""
        with ExitStack() as held:
            for part in sorted(parts):
                held.enter_context(self._locks[part])
            yield

    @contextmanager
    def free(self, part: str) -> Iterator[bool]:
        """Keep faults from breaking a part, if none does; whether that is so."""
        lock = self._locks[part]
        is_free = lock.acquire(blocking=False)
        try:
            yield is_free
        finally:
            if is_free:
                lock.release()

    def stop(self, report: Progress = quiet) -> None:
        """End everything."""
        self.stack.down(report)
        for proxy in self.links.values():
            proxy.close()

    # For those who look, and for faults ------------------------------------------------------------------------------

    def query(self, sql: str, parameters: object = None, role: Role = SourceRole.OWNER) -> list[tuple[Any, ...]]:
        """The rows of one statement, committed, as a role; by default as the owner of the source."""
        return query(self.settings, role, sql, parameters)

    def superuser(self, sql: str, parameters: object = None) -> list[tuple[Any, ...]]:
        """The rows of a statement that the server's superuser runs, who may end other sessions."""
        settings = self.settings
        password = settings.stack_postgres_password.get_secret_value()
        with (
            closing(
                psycopg2.connect(
                    host=ports.LOOPBACK,
                    port=settings.source_db_port,
                    user="postgres",
                    password=password,
                    require_auth=SCRAM,
                    dbname=settings.source_db_name,
                    connect_timeout=5,
                )
            ) as connection,
            connection,
            connection.cursor() as cursor,
        ):
            cursor.execute(sql, parameters)  # type: ignore[arg-type]
            return cursor.fetchall() if cursor.description else []

    def run(self, *words: str, links: Sequence[str] = ()) -> Done:
        """Run an `outbox` command to its end, as an operator would beside everything; through links, if any."""
        done = operator.run(Command(words[0], self.stack.through(*links), words), words)
        for connector in self.connectors:
            self.released[connector.kind] += lifecycle.released(connector) in done.output
        return done

    def check(self, when: str) -> None:
        """Check source, topics and sinks before something makes them equal, and keep the result. ``when`` names the
        fault. Raises Failure if a part that the check needs does not run.
        """
        done = self.run("check", "--json")
        try:
            self.checks.append(of_report(when, json.loads(done.output)))
        except ValueError:
            raise Failure(f"outbox check ended with {done.status}: {done.end}", code="check-failed") from None
