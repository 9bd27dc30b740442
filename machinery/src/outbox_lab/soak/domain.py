"""What a project tells the soak, in one file: its clients, what their changes are, and what must always hold."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from outbox.base import project
from outbox.base.errors import Failure
from outbox_lab.soak.foreign import ForeignEvent
from outbox_lab.soak.history import History
from outbox_lab.soak.releases import OlderRelease
from outbox_lab.soak.seen import TopicEvent
from outbox_lab.walkthrough.workload import Workload


class Refusal(NamedTuple):
    """How a sink refuses valid events: statements in the sink database, run by its owner."""

    reason: str  # of its dead letters
    begin: str
    end: str


class TableCopy(NamedTuple):
    """How to compare a captured table with what a sink has of it, row by row.

    Each query returns a row for each row of the table, by columns of the same names. A row that was deleted is in
    neither. In the sink database there may be rows of other sinks, which the query leaves out.
    """

    source: str  # in the source database, run by the owner; columns called as in the table
    sink: str  # in the sink database, run by the owner
    key: str = "id"  # the column of the primary key
    version: str | None = None
    """The column that each change of the other columns raises by one, if there is such a column."""


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


# Optional attributes of a domain. Each function returns one of them, or its default.


def clustered_of(domain: Domain) -> Sequence[str]:
    """The sinks that run in another process, by default none. Their tasks run on a Spark cluster of this host."""
    return getattr(domain, "clustered", ())


def contradictions_of(domain: Domain) -> Callable[[History, Mapping[str, TopicEvent]], Iterable[str]] | None:
    """Finds the reads that contradict the events, by id. None if the domain does not judge reads."""
    return getattr(domain, "contradictions", None)


def refusals_of(domain: Domain) -> Mapping[str, Refusal]:
    """By sink, how to make it refuse valid events for a while. Only for sinks that recognise every repeat."""
    return getattr(domain, "refusals", {})


def copies_of(domain: Domain) -> Mapping[str, TableCopy]:
    """By sink of a captured table, how to compare the sink's rows with the table."""
    return getattr(domain, "copies", {})


def forge_of(domain: Domain) -> Callable[[random.Random], ForeignEvent] | None:
    """Makes a valid event that the service would never write, with another key each time. None if nothing can.

    It is the first of its key, with version 1 if events have versions.
    """
    return getattr(domain, "foreign_event", None)


def older_of(domain: Domain) -> OlderRelease | None:
    """What an older release of the project lacks; the soak rolls out a new version of an event from that release."""
    return getattr(domain, "older", None)


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
    if any(isinstance(names, str) for names in domain.sinks):
        raise Failure(
            f"{named}: `sinks` names processes, and each is a sequence of sinks",
            'write one process of two sinks as sinks = (("orders", "totals"),)',
            code="soak-domain-wrong",
        )
    if isinstance(clustered_of(domain), str):
        raise Failure(
            f"{named}: `clustered` is a sequence of sinks", 'write clustered = ("orders",)', code="soak-domain-wrong"
        )
    return domain
