"""A project on an embedded stack: migrated databases, topics, an applied connector, the service and the sinks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from outbox.base.settings import Settings
from outbox.base.terminal import Progress
from outbox.kafka import topics
from outbox.relay import connectors, lifecycle
from outbox_lab.stack.command import ServiceCommand, SinkProcess, service, sink
from outbox_lab.stack.stack import Stack, quiet

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

    def start_relay(self, report: Progress = quiet) -> None:
        """Start the stack alone, with all that brings events to Kafka."""
        self.stack.up(report=report)
        self.update(report)

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
