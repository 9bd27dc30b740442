"""The embedded stack: Postgres, Kafka and Kafka Connect on loopback, without containers and without root.

A stack lives in one home folder, so that several stacks run side by side. ``up`` keeps the ports it chose and the
passwords it generated: in ``stack.env``, which every other command reads as settings, and what only its servers need
in ``stack.json``.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property
from pathlib import Path

import msgspec
import psutil

from outbox.base import envfile
from outbox.base.errors import Failure
from outbox.base.settings import PREFIX, Settings, address, load, stack_env, variable
from outbox.base.terminal import Progress
from outbox.jvm.jars import resolve
from outbox.kafka import topics
from outbox.relay import connectors, lifecycle
from outbox_lab.stack import internals, ports
from outbox_lab.stack.command import ServiceCommand, SinkProcess, service, sink
from outbox_lab.stack.connect import Connect
from outbox_lab.stack.internals import Internals
from outbox_lab.stack.kafka import CLIENT, MECHANISM, Kafka
from outbox_lab.stack.postgres import MAJOR, Postgres
from outbox_lab.stack.process import MARK, Process, environment, is_ours
from outbox_lab.stack.spark import SHARED, SparkMaster, SparkWorker, write_properties

PARTS = ("postgres", "kafka", "connect")
SERVERS = {"postgres", "kafka", "spark-master"}  # they need no other part, and others need them
SPARK_WORKER = re.compile(r"spark-worker-([1-9]\d*)")
# The ports of its parts. All are others if one is taken.
PREFERRED = {"postgres": 15432, "kafka": 19092, "controller": 19093, "connect": 18083, "spark": 17077}


def quiet(_: str) -> None:
    """A report that is ignored."""


class Stack:
    """The parts of one home folder. Data survives ``down`` and any crash; ``reset`` deletes it."""

    def __init__(self, settings: Settings, *, any_ports: bool = False, postgres_version: int = MAJOR) -> None:
        """At its first start the stack chooses ports, and gets data of this version of Postgres.

        ``any_ports``: prefer no ports, not even the one that the settings name for the service.
        """
        self.home = settings.home
        self._given = settings
        self._postgres_version = postgres_version
        self._preferred = {**PREFERRED, "service": address(settings.service_bind)[1]}
        if any_ports:
            self._preferred = dict.fromkeys(self._preferred, 0)

    @property
    def settings(self) -> Settings:
        """The given settings with the ports and passwords that ``up`` chose."""
        chosen = load(self.home, environment=False)
        names = [name.removeprefix(PREFIX).lower() for name in stack_env(self._given.stack_env_file)]
        return self._given.replace(**{name: getattr(chosen, name) for name in names})

    @property
    def parts(self) -> Sequence[str]:
        """The names of its parts, in the order in which they start."""
        workers = internals.read(self.home).spark_workers
        cluster = ["spark-master", *(f"spark-worker-{number + 1}" for number in range(workers))] if workers else []
        return [*PARTS, *cluster]

    def up(
        self, only: Iterable[str] = (), workers: int | None = None, report: Progress = quiet, *, wait: bool = True
    ) -> None:
        """Start the parts that do not run, and return when all are ready. ``only`` leaves the others alone.

        ``workers`` is the number of workers of a Spark cluster, on which sinks that start later run; 0 ends it.
        ``wait=False`` returns once all are started: the servers of the others are ready, the others not yet.

        Raises Failure naming the part that did not start, with the end of its log.
        """
        with self.locked(), self._addresses(report) as chosen:
            # Ports and passwords are chosen once: existing values in stack.env stay.
            file = self._given.stack_env_file
            values = {**chosen, **envfile.generate("kafka_password"), **stack_env(file)}
            envfile.write(file, values)
            wanted = internals.read(self.home).spark_workers if workers is None else workers
            if workers is not None or wanted or variable("spark_master") in values:
                self._resize(wanted, report)
            requested = set(only) or set(self.parts)
            if requested & {"kafka", "connect"}:
                resolve("kafka", report)
            parts = [self.part(name) for name in self.parts if name in requested]
            servers = [part for part in parts if part.name in SERVERS]
            # The broker formats its storage first; Postgres makes its data while the broker starts.
            started = self._spawn(reversed(servers), report)
            _wait_ready(servers, started, report)
            others = [part for part in parts if part not in servers]
            started = self._spawn(others, report)
            if wait:
                _wait_ready(others, started, report)

    def _spawn(self, parts: Iterable[Process], report: Progress) -> list[Process]:
        """Start those that do not run, and a worker again whose mode is not the requested one. Return the started."""
        started = []
        for part in parts:
            if isinstance(part, Connect) and not part.has_requested_mode():
                report(f"{part.name}: switching exactly-once {'on' if self.settings.exactly_once else 'off'}")
                if not self.settings.exactly_once and part.is_ready():
                    lifecycle.disable_exactly_once(self.settings)
                part.stop()
            if part.is_running():
                continue
            report(f"{part.name}: starting")
            part.spawn()
            started.append(part)
        return started

    def down(self, report: Progress = quiet, *, gently: bool = True) -> int:
        """Stop every process of this home folder: first the users of the stack, then its parts. Returns how many ran.

        Stacks in folders below, such as those of the walkthrough and of tests, are stopped too. With ``gently=False``
        all are killed, which suits a folder whose data is no longer needed; except Postgres, which would leave shared
        memory behind.
        """
        stopped = 0
        for home in sorted({home for home, _ in _marked(self.home)} - {self.home}):
            stopped += Stack(load(home, environment=False)).down(report, gently=gently)
        with self.locked(create=False):
            for process in [*self._others(), *(self.part(name) for name in reversed(self.parts))]:
                if process.processes():  # also children that a crash left behind
                    report(f"{process.name}: stopping")
                    if gently or isinstance(process, Postgres):
                        process.stop()
                    else:
                        process.kill()
                    stopped += 1
        return stopped

    def reset(self, report: Progress = quiet) -> None:
        """Stop everything and delete the home folder."""
        self.down(report)
        if self.home.exists():
            shutil.rmtree(self.home)

    def part(self, name: str) -> Process:
        """The controller of one part. Raises Failure for an unknown name."""
        settings = self.settings
        match name:
            case "postgres":
                return Postgres(settings)
            case "kafka":
                return Kafka(settings)
            case "connect":
                return Connect(settings)
            case "spark-master":
                return SparkMaster(settings)
        if match := SPARK_WORKER.fullmatch(name):
            return SparkWorker(int(match[1]), settings)
        raise Failure(f"no part is called {name}", f"the parts are {', '.join(self.parts)}", code="part-unknown")

    # ----------------------------------------------------------------------------------------------------------------

    def _others(self) -> list[Process]:
        """The other processes of this home: service, sinks, and what a demo or a test started here."""
        names = {name for home, name in _marked(self.home) if home == self.home and name not in self.parts}
        return [Process(name, self.home) for name in sorted(names)]

    def _resize(self, workers: int, report: Progress) -> None:
        """Let the cluster have so many workers, and stop those that are too many."""
        file, kept, shared = self._given.stack_env_file, internals.read(self.home), self.home / SHARED
        cluster = {"spark_master": f"spark://{ports.LOOPBACK}:{kept.spark_port}", "spark_properties": shared}
        values = {name: value for name, value in stack_env(file).items() if name not in map(variable, cluster)}
        if workers:
            write_properties(shared, workers)
            values |= {variable(name): str(value) for name, value in cluster.items()}
        # If this command is killed in between, the next `up` goes back to the number before.
        envfile.write(file, values)
        msgspec.structs.replace(kept, spark_workers=workers).write(self.home)
        # Also those that a command has left which was killed here.
        for process in reversed([other for other in self._others() if other.name.startswith("spark-")]):
            report(f"{process.name}: stopping")
            process.stop()

    @contextmanager
    def locked(self, *, create: bool = True) -> Iterator[None]:
        """Lock the home: two commands at once would start everything twice.

        Without ``create`` nothing is made: a home without a lock is one where nobody starts anything.
        """
        if create:
            self.home.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = self.home / "lock"
        with ExitStack() as held:
            try:
                lock = os.open(file, os.O_RDWR | os.O_NOFOLLOW | (os.O_CREAT if create else 0), mode=0o600)
                held.callback(os.close, lock)
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                why = f"another command is starting or stopping the stack in {self.home}"
                raise Failure(why, "wait until it has ended", code="stack-locked") from None
            except OSError as error:
                if create or not isinstance(error, FileNotFoundError):
                    why = f"the lock {file} cannot be taken: {error.strerror}"
                    remedy = "find out who made it, and delete it"
                    raise Failure(why, remedy, code="stack-not-lockable") from None
            yield

    @contextmanager
    def _addresses(self, report: Progress) -> Iterator[dict[str, str]]:
        """Settings with ports that no other stack takes meanwhile, and who logs in there."""
        preferred = self._preferred
        with ports.reserved(*preferred.values()) as chosen:
            if not self._given.stack_env_file.exists():
                if taken := [port for port in preferred.values() if port and not ports.is_free(port)]:
                    others = ", ".join(f"{name} {port}" for name, port in zip(preferred, chosen, strict=True))
                    report(f"port {', '.join(map(str, taken))} is taken, so this stack has other ports: {others}")
                # Before the settings: once these are there, servers are made with both.
                postgres, kafka, controller, connect, spark, service = chosen
                kept = Internals(postgres_version=self._postgres_version, controller_port=controller, spark_port=spark)
                kept.write(self.home)
            postgres, kafka, _, connect, _, service = chosen
            values = {
                "source_db_url": self._given.source_db_url.replace(port=postgres),
                "sink_db_url": self._given.sink_db_url.replace(port=postgres),
                "kafka_bootstrap": f"{ports.LOOPBACK}:{kafka}",
                "kafka_security_protocol": "SASL_PLAINTEXT",
                "kafka_sasl_mechanism": MECHANISM,
                "kafka_username": CLIENT,
                "connect_url": f"http://{ports.LOOPBACK}:{connect}",
                "connect_username": CLIENT,
                "service_bind": f"{self._given.service_bind.rpartition(':')[0]}:{service}",
            }
            yield {variable(name): str(value) for name, value in values.items()}


def _wait_ready(parts: Iterable[Process], started: Sequence[Process], report: Progress) -> None:
    for part in parts:
        if part not in started and part.is_ready():
            report(f"{part.name}: running")
        else:
            part.wait_ready()
            report(f"{part.name}: ready")


def _marked(top: Path) -> Iterator[tuple[Path, str]]:
    """Home folder and name of every controlled process of ours in this folder and those below."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if is_ours(process, top):
                home, _, name = environment(process).get(MARK, "").rpartition(":")
                # A mark has a resolved path: another one, with "..", may lead elsewhere.
                if home == os.path.realpath(home) and Path(home).is_relative_to(top):
                    yield Path(home), name


# A chain that waits for requests or for people polls all the time: with the defaults, two idle sinks and their servers
# take about one core, with these a quarter of one (`python -m bench idle`). An event arrives 0.1 s later.
PATIENT_MS = {"connector_poll_interval_ms": 25, "sink_trigger_interval_ms": 100}


class Deployment:
    """The parts of a project on a stack. Parts that run go on, so every method can be repeated, also as a repair."""

    def __init__(self, stack: Stack, sinks: Sequence[str] = ()) -> None:
        """``sinks`` run in one process; without names they are those of [tool.outbox]."""
        self.stack = stack
        self._names = sinks

    @property
    def settings(self) -> Settings:
        """The settings of the stack, which chooses ports and passwords when it starts."""
        return self.stack.settings

    @cached_property
    def service(self) -> ServiceCommand:
        """The service, once the stack has its ports."""
        return service(self.settings)

    @cached_property
    def sinks(self) -> SinkProcess:
        """The process of the sinks, once the stack has its ports."""
        return sink(self.settings, *self._names)

    def start(self, report: Progress = quiet) -> None:
        """Start everything, and return once all of it is ready.

        Worker, service and sinks start side by side: they need the servers, and not each other.
        """
        servers = ("postgres", "kafka")
        self.stack.up(servers, report=report)
        self._migrate(report)
        topics.create(self.settings, connectors.topic_specs(self.settings))
        others = [name for name in self.stack.parts if name not in servers]
        self.stack.up(others, report=report, wait=False)
        for process in (self.service, self.sinks):
            if not process.is_running():
                process.spawn()
        self.stack.up(others, report=report)
        self.apply(report)
        self.service.wait_ready()
        report(f"service on {self.service.url()}")
        self.sinks.wait_ready()

    def update(self, report: Progress = quiet) -> None:
        """Migrate the databases, and apply the connector with the declared events."""
        self._migrate(report)
        self.apply(report)

    def apply(self, report: Progress = quiet) -> None:
        """Apply the connector of the outbox."""
        done = lifecycle.apply(self.settings)
        report(f"connector {done}: {lifecycle.status(self.settings).mode}")

    def _migrate(self, report: Progress) -> None:
        from outbox.migrations.migrate import migrate

        migrate(self.settings)
        report("databases migrated")
