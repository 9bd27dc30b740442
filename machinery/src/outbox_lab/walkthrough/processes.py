"""The chain as processes on this machine: an embedded stack of its own, the service, and the sinks in one process."""

from __future__ import annotations

from collections.abc import Sequence

from outbox.base.settings import Settings
from outbox.base.terminal import Progress
from outbox_lab.stack.command import SinkProcess
from outbox_lab.stack.deployment import Deployment
from outbox_lab.stack.stack import Stack
from outbox_lab.walkthrough.chain import Chain

__all__ = ["Processes", "SinkProcess"]


class Processes(Chain):
    """A stack in a home folder of its own. Its data stays after ``restore``, so that it can be inspected."""

    def __init__(self, settings: Settings, sinks: Sequence[str]) -> None:
        self._deployment = Deployment(Stack(settings), sinks)

    @property
    def settings(self) -> Settings:
        return self._deployment.settings

    def sink_urls(self) -> list[str]:
        return [self._deployment.sinks.url()]

    def start(self, report: Progress) -> None:
        self._deployment.start(report)
        self.service, self.sinks = self._deployment.service, self._deployment.sinks
        self.worker, self.broker = (self._deployment.stack.part(name) for name in ("connect", "kafka"))

    def request(self, *, exactly_once: bool) -> None:
        self._deployment.stack = Stack(self.settings.replace(exactly_once=exactly_once))

    def start_worker(self, report: Progress) -> None:
        self._deployment.stack.up(["connect"], report=report)
        self._deployment.apply(report)
        self.worker = self._deployment.stack.part("connect")

    def switch(self, *, exactly_once: bool, report: Progress) -> None:
        self.request(exactly_once=exactly_once)
        self.start_worker(report)

    def restore(self, report: Progress) -> None:
        self._deployment.stack.down(report=report)
