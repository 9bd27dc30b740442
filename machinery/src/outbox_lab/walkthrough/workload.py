"""A project's part of the walkthrough: the requests of its clients, and the sinks to watch."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from outbox.base import project
from outbox.base.errors import Failure


@dataclass(frozen=True)
class Request:
    """A request, the statuses that the service may answer, and the number of events that it writes if it succeeds."""

    kind: str  # its name in the counts of responses
    path: str
    body: object  # sent as JSON; bytes are sent as they are
    expected: tuple[int, ...]
    events: int = 0
    method: str = "POST"
    has_key: bool = True
    has_token: bool = True


class Workload(Protocol):
    """The clients of a project. ``[tool.outbox]`` names the class, by default ``demo.workload:Workload``.

    The walkthrough makes one object of it, with a seed as the only argument. The same seed plans the same requests.
    """

    @property
    def right(self) -> str:
        """The sink that agrees with the source under every fault. An attribute of the class will do."""

    @property
    def naive(self) -> str | None:
        """A sink that applies every repeat, to watch it drift; None if the project has none."""

    def set_up(self, send: Callable[[Sequence[Request]], list[Any]]) -> None:
        """Create what planned requests refer to. ``send`` returns the JSON of each response, in the same order.

        The chain may have data already: choose new names for what you create.
        """

    def plan(self) -> Request:
        """The next request, now and then an invalid one. It is asked thousands of times and must always find one; most
        of them must succeed and write events.
        """


@runtime_checkable
class Listener(Protocol):
    """A workload that also sees the responses to what it planned. One call at a time, of `plan` or of this."""

    def answered(self, request: Request, status: int, body: Any) -> None:
        """Called with the JSON of each response, or with None if it is not JSON. Responses come in any order."""


def load(seed: int) -> Workload:
    """The project's workload. Raises Failure if the project has none."""
    named = project.current().workload
    module, _, attribute = named.partition(":")
    try:
        workload: Workload = getattr(importlib.import_module(module), attribute)(seed)
    except (ImportError, AttributeError, ValueError) as error:
        raise Failure(
            f"the walkthrough found no workload {named}: {error}",
            "write that class (docs/reference.md), or name another one: `workload` in [tool.outbox] of pyproject.toml",
            code="workload-missing",
        ) from error
    return workload
