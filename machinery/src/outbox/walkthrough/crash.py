"""Kill the sinks in the window that matters: their database has committed, Spark has not.

It needs no hook in the sinks, and there is no race. Each transaction of a sink takes a lock, which we hold for a while:

1. Hold the locks and restart the sinks: they wait before they read anything. Let a burst of events arrive.
2. Release the locks. Each sink becomes the driver; take its lock again while Spark starts.
3. Every sink waits with its batch. Freeze Spark, and release the locks: the sinks commit to their database, and Spark
   cannot record it. Kill them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from psycopg2.extensions import connection as Connection  # noqa: N812

from outbox.base.database import connect
from outbox.base.settings import Settings, SinkRole
from outbox.base.wait import wait_for
from outbox.sink import fence
from outbox.walkthrough.chain import Sinks
from outbox.walkthrough.checkpoint import Checkpoint

TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Crash:
    """The evidence, collected after the sink is dead."""

    planned_batch: int  # the last in Spark's log of planned batches
    committed_batch: int  # the last in its log of committed batches
    planned_end: int  # the end of the planned batch: the sum of its offsets over the partitions
    position: int  # the position in the sink's database: the same sum

    @property
    def fired(self) -> bool:
        """Whether the batch is in the sink's database and Spark has not recorded it."""
        return self.planned_batch > self.committed_batch and self.position == self.planned_end


class Window:
    """The window of some sinks between the commit of their database and Spark's."""

    def __init__(self, settings: Settings, sinks: Sinks, names: Sequence[str]) -> None:
        """Connect as the auditor. Raises Failure if a checkpoint is not in a folder of this host."""
        self._sinks = sinks
        self._names = names
        self._holder, self._watcher = connect(settings, SinkRole.AUDITOR), connect(settings, SinkRole.AUDITOR)
        self._watcher.autocommit = True
        self._checkpoints = {name: Checkpoint(settings, name, self._generation(name)) for name in names}

    def close(self) -> None:
        """Release what is held. Sinks that wait go on."""
        self._holder.close()
        self._watcher.close()

    def kill_in_it(self, burst: Callable[[], None]) -> dict[str, Crash]:
        """Restart the sinks, let ``burst`` bring events that one batch holds, and kill the sinks in the window.

        Returns the evidence by sink. The sinks are dead, or start again by themselves.
        """
        self._hold(self._names)
        self._sinks.restart()
        burst()
        position = {name: self._position(name) for name in self._names}
        planned = {name: self._planned(name) for name in self._names}
        self._let_them_start()
        self._wait(
            "each sink to bring a batch",
            lambda: (
                self._waiting() == len(self._names) and all(self._planned(name) > planned[name] for name in self._names)
            ),
        )
        self._sinks.pause_spark()
        self._holder.rollback()
        self._wait("the sinks to commit", lambda: all(self._position(name) > position[name] for name in self._names))
        self._sinks.kill()
        return {name: self._evidence(name) for name in self._names}

    def wait_replayed(self, crashes: dict[str, Crash]) -> None:
        """Wait until the restarted sinks have processed the batch of the crash again."""
        for name, crash in crashes.items():
            self._wait(f"sink {name} to replay its batch", partial(self._has_committed, name, crash.planned_batch))

    # ----------------------------------------------------------------------------------------------------------------

    def _hold(self, names: Sequence[str]) -> None:
        with self._holder.cursor() as cursor:
            for name in names:
                fence.lock(cursor, name)

    def _let_them_start(self) -> None:
        """Release the locks, and take each again as soon as its sink has become the driver."""
        epoch = {name: self._epoch(name) for name in self._names}
        self._holder.rollback()

        def all_held_again() -> bool:
            started = [name for name in epoch if self._epoch(name) > epoch[name]]
            self._hold(started)
            for name in started:
                del epoch[name]
            return not epoch

        self._wait("the sinks to acquire their fences", all_held_again)

    def _wait(self, what: str, condition: Callable[[], bool]) -> None:
        wait_for(what, condition, timeout_s=TIMEOUT_S, needs=self._sinks.require_running)

    def _evidence(self, name: str) -> Crash:
        checkpoint, newest = self._checkpoints[name], self._planned(name)
        return Crash(
            planned_batch=newest,
            committed_batch=checkpoint.committed(),
            planned_end=sum(end for ends in checkpoint.ends(newest).values() for end in ends.values()),
            position=self._position(name),
        )

    def _planned(self, name: str) -> int:
        return self._checkpoints[name].planned()

    def _has_committed(self, name: str, batch: int) -> bool:
        return self._checkpoints[name].committed() >= batch

    def _generation(self, name: str) -> int:
        return self._one("SELECT generation FROM sinks WHERE name = %s", [name])

    def _waiting(self) -> int:
        """How many sessions wait for an advisory lock in this database."""
        return self._one(
            "SELECT count(*) FROM pg_locks JOIN pg_database ON pg_database.oid = database"
            " WHERE datname = current_database() AND locktype = 'advisory' AND NOT granted",
            [],
        )

    def _position(self, name: str) -> int:
        return self._one("SELECT coalesce(sum(next_offset), 0) FROM positions WHERE sink = %s", [name])

    def _epoch(self, name: str) -> int:
        return self._one("SELECT epoch FROM sinks WHERE name = %s", [name])

    def _one(self, query: str, values: Sequence[str]) -> int:
        """The number that a query returns; 0 without a row."""
        return _number(self._watcher, query, values)


def _number(connection: Connection, query: str, values: Sequence[str]) -> int:
    with connection.cursor() as cursor:
        cursor.execute(query, values)
        row = cursor.fetchone()
        return int(row[0]) if row else 0
