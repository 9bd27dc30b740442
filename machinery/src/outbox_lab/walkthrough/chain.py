"""The interface of a chain to the walkthrough, wherever its parts run. The story uses only this interface.

Two implementations: `processes` of a stack of its own, and the `containers` of docker-compose.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

from outbox.base.settings import Settings
from outbox.base.terminal import Progress


class Watched(Protocol):
    """A part of the chain, to watch."""

    def require_running(self) -> None:
        """Raises Failure if it has ended unasked: for a wait that needs it."""


class Part(Watched, Protocol):
    """A part of the chain, to watch and to break."""

    name: str

    def start(self) -> None:
        """Return once it runs and is ready; start it if need be. Raises Failure if it does not come up."""

    def pause(self) -> None:
        """Freeze it (SIGSTOP): it keeps its connections and answers nothing."""

    def resume(self) -> None:
        """Undo ``pause``. Does nothing to a part that is not frozen."""

    def kill(self) -> None:
        """End it as a crash would (SIGKILL), and return once none of its processes is left."""

    def pid(self) -> int | None:
        """The main process of the part; None if the part does not run."""

    def is_running(self) -> bool:
        """Whether it runs, ready or not."""


class Sinks(Part, Protocol):
    """The sinks that the walkthrough watches, as one part."""

    def pause_spark(self) -> None:
        """Freeze Spark. The drivers go on: they commit to their database, and Spark cannot record it."""


class Chain(ABC):
    """A chain with an outbox's source, a Connect worker, and the sinks that a workload names."""

    worker: Part
    broker: Part | None = None  # None before the start, and where its process is out of reach
    service: Watched
    sinks: Sinks

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
