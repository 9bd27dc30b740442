"""The domain that a project describes to the soak, in one file: clients, their changes, and what must always hold."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from outbox.base import project
from outbox.base.errors import Failure
from outbox_lab.soak.history import History, TopicEvent
from outbox_lab.walkthrough.workload import Workload


class Refusal(NamedTuple):
    """How a sink refuses valid events: statements in the sink database, run by its owner."""

    reason: str  # of its dead letters
    begin: str
    end: str


class Effects(NamedTuple):
    """The effects of a handler, one for each event: rows of a table in the sink database."""

    table: str  # that each call writes to
    query: str
    """Returns (key, event id) for each effect, those of a key in the order in which they came; run by the owner."""


class Domain(Workload, Protocol):
    """The workload of the walkthrough, and how to judge what it has done.

    ``[tool.outbox]`` names the class, by default ``demo.soak:Domain``. The soak makes one object of it, with a seed as
    the only argument. The same seed plans the same requests.

    A *change* is what one request writes, in one transaction; the domain names it, for example ``order 6f1f…``.
    """

    @property
    def sinks(self) -> Sequence[Sequence[str]]:
        """The sinks to run, of any strategies: the names of those of each process."""

    @property
    def changes(self) -> str:
        """A query in the source database, run by the owner: (change, number of its events), a row for each change."""

    @property
    def invariants(self) -> Mapping[str, str]:
        """Queries in the source database, run by the owner: each returns a row, of one text, for what violates it."""

    def change_of_answer(self, body: Any) -> str:
        """The change that a successful answer of the service is about."""

    def change_of_event(self, event: TopicEvent) -> str:
        """The change that has written an event."""


class Options(NamedTuple):
    """The optional attributes of a domain."""

    plain: Sequence[str] = ()
    """The sinks that run in another process, without Spark."""
    handlers: Mapping[str, Effects] = {}
    """The handlers that run in another process, by name, and the effects of each."""
    contradictions: Callable[[History, Mapping[str, TopicEvent]], Iterable[str]] | None = None
    """Finds the reads that contradict the events, by id."""
    refusals: Mapping[str, Refusal] = {}
    """By sink, how to make it refuse valid events for a while. Only for sinks that recognise every repeat."""


NO_OPTIONS = Options()


def options_of(domain: Domain) -> Options:
    """The optional attributes that a domain has, or their defaults."""
    return Options(**{name: getattr(domain, name) for name in Options._fields if hasattr(domain, name)})


def load(seed: int) -> Domain:
    """The project's domain. Raises Failure if the project has none, or if it does not group its sinks."""
    named = project.current().soak
    module, _, attribute = named.partition(":")
    try:
        domain: Domain = getattr(importlib.import_module(module), attribute)(seed)
    except (ImportError, AttributeError, ValueError) as error:
        raise Failure(
            f"the soak found no domain {named}: {error}",
            "write that class, as docs/soak.md shows, or name another one: `soak` in [tool.outbox] of pyproject.toml",
            code="soak-domain-missing",
        ) from error
    if any(isinstance(names, str) for names in (*domain.sinks, options_of(domain).plain)):
        raise Failure(
            f"{named}: each process of `sinks`, and `plain`, is a sequence of sinks",
            'write one process of two sinks as sinks = (("orders", "totals"),), and plain = ("orders",)',
            code="soak-domain-wrong",
        )
    return domain
