"""The interfaces that apply events to a sink's target: the writer of a running sink, and the applier of a replay.

Nothing here knows Spark, so that tests and benchmarks drive it as it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

from outbox.base.database import database_errors
from outbox.base.heavy import extensions, pa
from outbox.sink.decoding.batch import Batch
from outbox.sink.decoding.records import Fetch
from outbox.sink.remembering import asked, fence, positions
from outbox.sink.remembering.asked import Asked
from outbox.sink.remembering.positions import Beginning, TopicOffsets
from outbox.sink.remembering.strategy import Strategy

PARKED = "parked"  # the reason of an event that waits for an earlier one of its key
COUNT = """
UPDATE public.sinks
   SET applied = applied + %(applied)s, duplicates = duplicates + %(duplicates)s, skipped = skipped + %(skipped)s,
       filtered = filtered + %(filtered)s
 WHERE name = %(sink)s
"""


class Counts(NamedTuple):
    """Counts of one batch: rows = applied + duplicates + rejected + filtered. ``dead`` counts the records that were no
    events, ``skipped`` the events that the sink has not asked for, ``filtered`` those that its transform left out.
    """

    rows: int = 0
    applied: int = 0
    duplicates: int = 0
    rejected: int = 0
    dead: int = 0
    skipped: int = 0
    filtered: int = 0


class Due(NamedTuple):
    """Dead letters that are to be replayed now, with what is parked behind them, so many in one transaction."""

    letters: Sequence[str] = ()
    at_once: int = 1


class SinkWriter(ABC):
    """Applies batches on a connection that holds the sink's fence for as long as it lives."""

    _is_stored = False  # what the job asks for; a writer whose transaction fails is of no more use

    def __init__(self, connection: extensions.connection, job: Asked) -> None:
        """Acquire the fence. Raises Failure if the sink has a driver already, or if its job asks for something else
        than at its last start (`outbox.sink.remembering.asked`). What it asks for now is stored by the first commit
        behind the other checks of the start: a start that is refused changes nothing.
        """
        self.name = job.sink
        self._job = job
        self._connection = connection
        self.connections = [connection]
        """All that it works with: a list that may grow."""
        self._declared = {topic: decoder.declared_names for topic, decoder in job.decoders.items()}
        with self._errors("does not let the sink start"):
            self._term = fence.acquire(connection, self.name)
            with connection, connection.cursor() as cursor:
                self.fence_holder = fence.driver(cursor, self.name)  # ourselves, as others see us
                self._require_fence(cursor)
                if (failure := asked.problem(cursor, job)) is not None:
                    raise failure
                self._skipped = asked.skipped(cursor, self.name)

    @abstractmethod
    def prepare(self, returned: pa.Schema) -> None:
        """Let the sink take these columns, which its transform returns. A sink with one needs that, once."""

    def positions(self, topic: str, topic_id: str) -> dict[int, int]:
        """By partition the next offset to read. Raises Failure if they belong to an earlier topic of that name."""
        with self._errors("does not return positions"), self._connection, self._connection.cursor() as cursor:
            return positions.read(cursor, self.name, topic, topic_id)

    def begin(self) -> None:
        """Store what the job asks for, after all checks of a start; without it the first batch does."""
        with self._errors("does not let the sink start"), self._connection, self._connection.cursor() as cursor:
            self._enter(cursor)

    def beginning(self) -> Beginning:
        """Which checkpoint is the sink's, and where it begins if that was set."""
        with self._errors("does not return generations"), self._connection, self._connection.cursor() as cursor:
            return positions.beginning(cursor, self.name)

    def begin_generation(self, *, is_replayed: bool = False) -> Beginning:
        """Let another checkpoint take the place of the present one. If it is lost, it begins where that would; or at
        the positions, if what a rewind has asked for is read.
        """
        with self._errors("does not take a generation"), self._connection, self._connection.cursor() as cursor:
            self._enter(cursor)
            offsets = {} if is_replayed else positions.beginning(cursor, self.name).offsets
            positions.start_generation(cursor, self.name, offsets)
            beginning = positions.beginning(cursor, self.name)
        self._term = self._term._replace(generation=beginning.generation)
        return beginning

    def begin_at(self, starts: TopicOffsets, topic_ids: Mapping[str, str]) -> None:
        """Declare where a sink begins on topics without positions, on all or none: lower offsets do not concern it."""
        with self._errors("does not take positions"), self._connection, self._connection.cursor() as cursor:
            self._enter(cursor)
            for topic, start in starts.items():
                positions.write(cursor, self.name, topic, topic_ids[topic], start)

    def apply(self, batch: Batch) -> Counts:
        """Apply a batch and commit. An empty one costs no transaction.

        Raises Failure, with nothing changed, if events before the batch are lost, if another driver took over, or if
        the database refused the batch; and if the connection broke, when the outcome is unknown and the fence is gone.
        Either way the writer is of no more use: let the sink be started again.
        """
        if batch.is_empty:
            return Counts()
        with self._errors(f"refused offsets {dict(batch.start)} to {dict(batch.end)} of topic {batch.topic}"):
            return self._apply(batch)

    @abstractmethod
    def _apply(self, batch: Batch) -> Counts:
        """Apply a batch that is not empty."""

    def due(self, at_most: int) -> Due:
        """The dead letters that are to be replayed now. A plain sink asks between its batches."""
        del at_most
        return Due()

    def _errors(self, what: str, connection: extensions.connection | None = None) -> AbstractContextManager[None]:
        return database_errors(connection or self._connection, f"sink {self.name}", what, "start the sink again")

    def _continue(self, cursor: extensions.cursor, batch: Batch) -> dict[int, int]:
        """Begin the transaction of a batch. Returns the stored positions, which it must continue."""
        self._enter(cursor)
        stored = positions.read(cursor, self.name, batch.topic, batch.topic_id)
        positions.require_no_gap(self.name, batch.topic, stored, batch.start)
        return stored

    def _move_past(self, cursor: extensions.cursor, batch: Batch, applied: Applied) -> Counts:
        """Move the positions past a batch, count it, and record what it has skipped, in the caller's transaction.

        A name that is recorded in a transaction that is rolled back is recorded again by the next driver.
        """
        positions.write(cursor, self.name, batch.topic, batch.topic_id, batch.end)
        recorded = self._skipped.setdefault(batch.topic, set())
        new = asked.new_names(recorded, batch.chunk.skipped, self._declared[batch.topic])
        asked.record(cursor, self.name, batch.topic, new)
        recorded.update(new)
        chunk = batch.chunk
        duplicates, skipped = chunk.count - sum(applied), sum(chunk.skipped.values())
        counts = Counts(chunk.count, duplicates=duplicates, dead=chunk.dead_count, skipped=skipped, **applied._asdict())
        count(cursor, self.name, counts)
        return counts

    def _enter(self, cursor: extensions.cursor) -> None:
        """Begin a transaction that changes something."""
        self._require_fence(cursor)
        if not self._is_stored:
            asked.store(cursor, self._job)
            self._is_stored = True

    def _require_fence(self, cursor: extensions.cursor) -> None:
        fence.lock(cursor, self.name)
        fence.require_term(cursor, self.name, self._term)


def count(cursor: extensions.cursor, sink: str, counts: Counts) -> None:
    """Add to a sink's counts of all time, in the caller's transaction."""
    cursor.execute(COUNT, {"sink": sink, **counts._asdict()})


class Applied(NamedTuple):
    """Counts of a batch: applied rows, rejected events, new events that a transform left out. Others are duplicates."""

    applied: int
    rejected: int
    filtered: int = 0


class Applier(Protocol):
    """Applies events, with the temporary tables of a connection."""

    name: str
    strategy: Strategy

    def prepare(self, cursor: extensions.cursor) -> None:
        """Make the temporary tables of the session."""

    def lost(self, event_ids: Collection[str]) -> Collection[str]:
        """The given events, whose dead letters are closed, that the result does not have any more. A result that is
        committed with its dead letters loses none.
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
