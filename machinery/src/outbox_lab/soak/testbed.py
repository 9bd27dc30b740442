"""The chain that is soaked: an embedded stack of its own, with a proxy on each link between two parts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from outbox.base.database import query
from outbox.base.errors import Failure
from outbox.base.settings import Role, Settings, SourceRole, address
from outbox.base.terminal import Progress
from outbox.base.wait import wait_for
from outbox.kafka import topics
from outbox.kafka.spec import TopicSpec
from outbox.relay import connectors, lifecycle
from outbox.relay.connectors import Connector
from outbox.sink import discovery
from outbox.sink.spec import SinkSpec
from outbox_lab.soak.domain import NO_OPTIONS, Options
from outbox_lab.soak.history import Checked, checked
from outbox_lab.soak.proxy import Proxy
from outbox_lab.stack import interrupt, ports
from outbox_lab.stack.command import Command, ServiceCommand, SinkProcess
from outbox_lab.stack.connect import Connect
from outbox_lab.stack.kafka import Kafka
from outbox_lab.stack.postgres import Postgres
from outbox_lab.stack.process import Process
from outbox_lab.stack.stack import Stack, quiet

LINKS = ("client-service", "service-postgres", "debezium-postgres", "connect-kafka", "sinks-kafka", "sinks-postgres")
PARTS = ("postgres", "kafka", "connect", "connector", "service", "sinks", "outbox-ids", *LINKS)
# What is between the slot of a captured table and the stored offset is unknown. A snapshot is the one way to go on.
SLOT_AHEAD = {"slot-ahead", "slot-missing", "slot-released"}
# Ten sinks on a few cores, each with a batch for every two events, would leave none for Spark's start after a fault.
TRIGGER_INTERVAL_MS = 2000
# The many short waits of a worker that is fast cost half a core, which a soak needs for what its faults do.
WAITS_MS = {"connector_poll_interval_ms": 50}
WRITTEN_PARTITIONS = 3  # of a topic that a sink writes to
START_TIMEOUT_S = 300.0  # of service and sinks: beside clients, and whatever else starts again after a fault
# By engine, the command that runs sinks on it.
ENGINES = {"spark": ["sink"], "plain": ["sink", "--plain"], "handlers": ["handle"]}


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
                    database = "sink_db_url" if name.startswith("sinks") else "source_db_url"
                    changed[database] = getattr(self.settings, database).replace(port=port)
                case _:
                    changed["service_bind"] = f"{ports.LOOPBACK}:{port}"
        return self.settings.replace(**changed)


# Commands of an operator -------------------------------------------------------------------------------------------

COMMAND_TIMEOUT_S = 600
LOOK_S = 1.0
PREFIX = "failure-code: "
# As `python -m outbox`, and the last line on stderr is the code. A traceback has no such line.
CODED = f"""
import sys
from outbox import cli
from outbox.base.errors import Failure
try:
    cli.outbox.main(standalone_mode=False)
except Failure as failure:
    sys.exit(f"outbox: {{failure}}\\n{PREFIX}{{failure.code}}")
"""


@dataclass(frozen=True)
class Done:
    """The end of a command."""

    status: int
    output: str
    errors: str

    @property
    def code(self) -> str:
        """The code of its failure. Empty if it has succeeded, or has ended otherwise, as with a traceback."""
        last = self.errors.strip().rpartition("\n")[2]
        return last.removeprefix(PREFIX) if self.status and last.startswith(PREFIX) else ""

    @property
    def end(self) -> str:
        """The last line that it printed."""
        lines = [line for line in (self.output + self.errors).splitlines() if not line.startswith(PREFIX)]
        return lines[-1].strip()[:300] if lines else ""


def run_command(settings: Settings, words: Sequence[str]) -> Done:
    """Run an `outbox` command to its end, with exactly these settings.

    The first Ctrl-C of a terminal, which ends the faults, does not reach it. Raises Failure once a signal has ended the
    run, and then the command is killed.
    """
    with subprocess.Popen(
        [sys.executable, "-c", CODED, *words],
        env={**os.environ, **Command(words[0], settings, words).env()},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:

        def printed() -> tuple[str, str] | None:
            with suppress(subprocess.TimeoutExpired):
                return process.communicate(timeout=LOOK_S)
            return None

        what = f"`outbox {' '.join(words)}` to end"
        needs = interrupt.require_none
        try:
            output, errors = wait_for(what, printed, timeout_s=COMMAND_TIMEOUT_S, poll_s=0, needs=needs)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    return Done(process.returncode, output, errors)


class SinkPart(SinkProcess):
    """Sinks in one process, on an engine of ENGINES, which a fault may change."""

    start_timeout_s = START_TIMEOUT_S

    def __init__(self, name: str, settings: Settings, names: Sequence[str], engine: str) -> None:
        super().__init__(name, settings, [])
        self.names, self.own_engine = names, engine
        self.run_on(engine)

    def run_on(self, engine: str) -> None:
        """Run on this engine from the next start on."""
        self.engine = engine
        self._arguments = [*ENGINES[engine], *self.names]

    def __str__(self) -> str:
        return f"{self.name} ({self.engine})"


class Testbed:
    """Everything that runs, and what faults do to it.

    Faults in different threads break different parts: each holds the parts that it breaks (`holding`).
    """

    def __init__(self, settings: Settings, sinks: Sequence[Sequence[str]], options: Options = NO_OPTIONS) -> None:
        """``sinks``: the sinks of each process on Spark. ``options``: of the domain."""
        self.stack = LinkedStack(settings.replace(**WAITS_MS))
        self.options = options
        self.may_hang = False  # a broker was killed, and may have left a transaction open (`outbox.relay.offsets`)
        self.released: Counter[str] = Counter()  # by connector, how many were ended; their events are on topics twice
        self.checks: list[Checked] = []  # what `check` has found
        engines = {"plain": options.plain, "handlers": [*options.handlers]}
        self._groups = [(names, "spark") for names in sinks]
        self._groups += [(names, engine) for engine, names in engines.items() if names]
        self._locks = {part: threading.Lock() for part in PARTS}

    @property
    def settings(self) -> Settings:
        """How to reach it without the proxies: for those who look, not for those who work."""
        return self.stack.settings

    @property
    def links(self) -> Mapping[str, Proxy]:
        return self.stack.links

    @cached_property
    def worker(self) -> Connect:
        """The Connect worker."""
        return Connect(self.stack.through("connect-kafka", "debezium-postgres"))

    @cached_property
    def second_worker(self) -> Connect:
        """Another worker of the same group, which some faults start."""
        through = self.stack.through("connect-kafka", "debezium-postgres")
        return Connect(through.replace(connect_url=f"http://{ports.LOOPBACK}:{ports.choose(0)[0]}"), "connect-2")

    @cached_property
    def service(self) -> ServiceCommand:
        made = ServiceCommand("service", self.stack.through("service-postgres"), ["serve"])
        made.start_timeout_s = START_TIMEOUT_S
        return made

    @cached_property
    def sinks(self) -> Sequence[SinkPart]:
        return [self.sinks_of(f"sinks-{number}", *group) for number, group in enumerate(self._groups)]

    def sinks_of(self, name: str, names: Sequence[str], engine: str) -> SinkPart:
        """A process of sinks, which is not started."""
        through = self.stack.through("sinks-kafka", "sinks-postgres")
        return SinkPart(name, through.replace(sink_trigger_interval_ms=TRIGGER_INTERVAL_MS), names, engine)

    def sinks_on(self, *engines: str) -> list[SinkPart]:
        """The processes of sinks that run on these engines."""
        return [one for one in self.sinks if one.engine in engines]

    def process_of(self, sink: str) -> SinkPart:
        return next(one for one in self.sinks if sink in one.names)

    @property
    def sink_names(self) -> Sequence[str]:
        return [name for names, _ in self._groups for name in names]

    @property
    def sink_specs(self) -> Sequence[SinkSpec]:
        """The declarations of these sinks in the project."""
        known = discovery.sinks(self.settings) if self.sink_names else {}
        return [known[name] for name in self.sink_names]

    @property
    def written_topics(self) -> Mapping[str, str]:
        """By sink, the topic that it writes to."""
        return {one.name: topic for one in self.sink_specs for topic in one.target.topics}

    def readers(self, topic: str) -> Sequence[SinkSpec]:
        """The sinks that read a topic."""
        return [one for one in self.sink_specs if topic in one.topics]

    @cached_property
    def captures(self) -> Sequence[Connector]:
        """The connectors of the captured tables that a sink reads."""
        read = {topic for one in self.sink_specs for topic in one.decoders}
        return [one for one in connectors.others(self.settings) if one.topic in read]

    @property
    def connectors(self) -> Sequence[Connector]:
        """All that it needs: that of the outbox, and those of captured tables."""
        return [connectors.load(self.settings), *self.captures]

    def start(self, report: Progress = quiet) -> None:
        """Start every part and the relay, on empty data."""
        self.stack.up(["postgres"], report=report)  # which chooses all ports
        settings = self.settings
        postgres, service = settings.source_db_url.port, address(settings.service_bind)[1]
        kafka = ports.choose(0, 0)
        targets = dict(zip(LINKS, (service, postgres, postgres, *kafka, postgres), strict=True))
        self.stack.links = {name: Proxy(name, port) for name, port in targets.items()}
        self.stack.up(["kafka", "connect"], report=report)
        from outbox.migrations.migrate import migrate

        migrate(settings)
        self.apply()
        if written := self.written_topics.values():
            topics.create(settings, [TopicSpec(name, WRITTEN_PARTITIONS, {}) for name in written])
        self.service.spawn()
        for sink in self.sinks:
            sink.spawn()
        parts: list[Process] = [self.service, *self.sinks]
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

    def query(self, sql: str, parameters: object = None, role: Role = SourceRole.OWNER) -> list[tuple[Any, ...]]:
        """The rows of one statement, committed, as a role; by default as the owner of the source."""
        return query(self.settings, role, sql, parameters)

    def superuser(self, sql: str, parameters: object = None) -> list[tuple[Any, ...]]:
        """The rows of a statement that the server's superuser runs, who may end other sessions."""
        session = Postgres(self.settings).connect(self.settings.source_db_url.name)
        with closing(session) as connection, connection, connection.cursor() as cursor:
            cursor.execute(sql, parameters)  # type: ignore[arg-type]
            return cursor.fetchall() if cursor.description else []

    def run(self, *words: str, links: Sequence[str] = ()) -> Done:
        """Run an `outbox` command to its end, as an operator would beside everything; through links, if any."""
        done = run_command(self.stack.through(*links), words)
        for connector in self.connectors:
            self.released[connector.kind] += lifecycle.released(connector) in done.output
        return done

    def check(self, when: str) -> None:
        """Check source, topics and sinks before something makes them equal, and keep the result. ``when`` names the
        fault. Raises Failure if a part that the check needs does not run.
        """
        done = self.run("check", "--json")
        try:
            self.checks.append(checked(when, json.loads(done.output)))
        except ValueError:
            raise Failure(f"outbox check ended with {done.status}: {done.end}", code="check-failed") from None
