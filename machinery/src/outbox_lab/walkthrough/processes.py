"""The chain as processes on this machine: an embedded stack of its own, the service, and the sinks in one process."""

from __future__ import annotations

from collections.abc import Sequence

from outbox.base.settings import Settings
from outbox.base.terminal import Progress
from outbox.migrations.migrate import migrate
from outbox.relay import lifecycle
from outbox_lab.stack import command
from outbox_lab.stack.command import SinkCommand
from outbox_lab.stack.stack import Stack
from outbox_lab.walkthrough.chain import Chain


class SinkProcess(SinkCommand):
    """All sinks of the walkthrough in one process."""

    def restart(self) -> None:
        self.stop()
        self.spawn()

    def pause_spark(self) -> None:
        driver = self.pid()
        for process in self.processes():
            if process.pid != driver:
                process.suspend()


class Processes(Chain):
    """A stack in a home folder of its own. Its data stays after ``restore``, so that it can be inspected."""

    sinks: SinkProcess

    def __init__(self, settings: Settings, sinks: Sequence[str]) -> None:
        self._stack = Stack(settings)
        self._names = sinks

    @property
    def settings(self) -> Settings:
        return self._stack.settings

    def sink_urls(self) -> list[str]:
        return [self.sinks.url()]

    def start(self, report: Progress) -> None:
        self._stack.up(report=report)
        migrate(self.settings)
        report("databases migrated")
        lifecycle.apply(self.settings)
        report(f"connector applied: {lifecycle.status(self.settings).mode}")
        self.worker, self.broker = self._stack.part("connect"), self._stack.part("kafka")
        self.service = command.service(self.settings)
        self.sinks = SinkProcess("-".join(["sink", *self._names]), self.settings, ["sink", *self._names])
        for process in (self.service, self.sinks):
            if not process.is_running():
                process.spawn()
        self.service.wait_ready()
        report(f"service on http://{self.settings.service_host}:{self.settings.service_port}")
        self.sinks.wait_ready()

    def switch(self, *, exactly_once: bool, report: Progress) -> None:
        self._stack = Stack(self.settings.model_copy(update={"exactly_once": exactly_once}))
        self._stack.up(["connect"], report=report)
        lifecycle.apply(self.settings)
        self.worker = self._stack.part("connect")

    def restore(self, report: Progress) -> None:
        self._stack.down(report=report)
