"""The interface of a chain to the walkthrough, wherever its parts run. The story uses only this interface.

Two implementations: `processes` of a stack of its own, and the `containers` of docker-compose.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

from outbox.base.settings import Settings
from outbox.base.terminal import Progress
from outbox_lab.stack.process import Process


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
