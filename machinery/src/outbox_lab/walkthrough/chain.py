"""A chain as the walkthrough sees it, wherever its parts run: here as processes of a stack of its own, and in
`containers` as those of docker-compose. The story uses only the interface.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from outbox.base.settings import Settings
from outbox.base.terminal import Progress
from outbox_lab.stack.process import Process
from outbox_lab.stack.stack import Deployment, Stack, quiet


class Watched(Protocol):
    """A part of the chain, to watch."""

    def require_running(self) -> None:
        """Raises Failure if it has ended unasked: for a wait that needs it."""


class Chain(ABC):
    """A chain with an outbox's source, a Connect worker, and the sinks that a workload names."""

    worker: Process
    broker: Process | None = None  # None before the start, and where its process is out of reach
    service: Watched
    sinks: Process  # all that the walkthrough watches

    @property
    @abstractmethod
    def settings(self) -> Settings:
        """How to reach it, with the requested exactly-once mode."""

    @abstractmethod
    def sink_urls(self) -> list[str]:
        """Where the processes of the sinks serve their metrics and ``/healthz``; a restart may change it. Raises
        Failure if one has ended.
        """

    @abstractmethod
    def start(self, report: Progress) -> None:
        """Return once every part is ready, with migrated databases and an applied connector. Parts that run go on, so
        that it also repairs a chain.
        """

    @abstractmethod
    def request(self, *, exactly_once: bool) -> None:
        """Let the next start of the worker have exactly-once on or off."""

    @abstractmethod
    def start_worker(self, report: Progress) -> None:
        """Return once the worker runs in the requested mode, with an applied connector. A killed worker starts."""

    @abstractmethod
    def switch(self, *, exactly_once: bool, report: Progress) -> None:
        """Restart the worker with exactly-once on or off, and apply the connector."""

    @abstractmethod
    def restore(self, report: Progress) -> None:
        """Leave the chain as it was before the walkthrough. May be called at any time, and repeated."""


class Processes(Deployment, Chain):  # type: ignore[misc] # its cached properties are attributes of a chain
    """An embedded stack in a home folder of its own, the service, and the sinks in one process. Its data stays after
    ``restore``, so that it can be inspected.
    """

    def __init__(self, settings: Settings, sinks: Sequence[str]) -> None:
        super().__init__(Stack(settings), sinks)

    def sink_urls(self) -> list[str]:
        return [self.sinks.url()]

    def start(self, report: Progress = quiet) -> None:
        super().start(report)
        self.worker, self.broker = self.stack.part("connect"), self.stack.part("kafka")

    def request(self, *, exactly_once: bool) -> None:
        self.stack = Stack(self.settings.replace(exactly_once=exactly_once))

    def start_worker(self, report: Progress) -> None:
        self.stack.up(["connect"], report=report)
        self.apply(report)
        self.worker = self.stack.part("connect")

    def switch(self, *, exactly_once: bool, report: Progress) -> None:
        self.request(exactly_once=exactly_once)
        self.start_worker(report)

    def restore(self, report: Progress) -> None:
        self.stack.down(report=report)
