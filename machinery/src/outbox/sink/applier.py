"""What applies the events of dead letters, wherever the sink's result is kept."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple, Protocol

from psycopg2 import extensions

from outbox.sink.batch import Batch
from outbox.sink.records import Fetch
from outbox.sink.strategy import Strategy

PARKED = "parked"  # the reason of an event that waits for an earlier one of its key


class Applied(NamedTuple):
    """What became of a batch: rows that were applied, events that were rejected, events that were new and that the
    sink's transform left out. The other rows were duplicates.
    """

    applied: int
    rejected: int
    filtered: int = 0


class Applier(Protocol):
    """Applies events, with the temporary tables of a connection."""

    name: str
    strategy: Strategy

    def prepare(self, cursor: extensions.cursor) -> None:
        """Make the temporary tables of the session."""

    def end(self, cursor: extensions.cursor) -> None:
        """Drop the temporary tables, so that the session may be prepared for another sink."""

    def lost(self, event_ids: Collection[str]) -> Collection[str]:
        """Those of these events, whose dead letters are closed, that the result does not have any more. A result that
        is committed with its dead letters loses none.
        """
        del event_ids
        return ()

    def replay(self, cursor: extensions.cursor, batch: Batch, fetch: Fetch, *, older_than_horizon: bool) -> Applied:
        """Apply the events of a batch, whose dead letters are open, in the caller's transaction with the sink's lock.

        A transform, and a target outside of the database, run between two transactions: the caller's ends before, and
        another one is open when this returns, which the caller's commit ends. The sink's lock is held all the time.

        Each event ends as applied or as a duplicate, and its dead letter is closed; or as rejected, and its dead letter
        stays open. ``older_than_horizon`` also applies events that the strategy has forgotten: the caller is sure that
        they were never applied.
        """
