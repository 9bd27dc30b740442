"""Kill the sinks in the window that matters: their database has committed, Spark has not.

It needs no hook in the sinks, and there is no race. Each transaction of a sink takes a lock, which we hold for a while:

1. Hold the locks and restart the sinks: they wait before they read anything. Let a burst of events arrive.
2. Release the locks. Each sink becomes the driver; take its lock again while Spark starts.
3. Every sink waits with its batch; one of several topics has a transaction for each, and waits with the last of them.
   Freeze Spark, and release the locks: the sinks commit to their database, and Spark cannot record it. Kill them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from outbox.base.database import connect
from outbox.base.settings import Settings, SinkRole
from outbox.base.wait import wait_for
from outbox.sink.remembering import fence
from outbox_lab.walkthrough.chain import Sinks
from outbox_lab.walkthrough.checkpoint import Checkpoint

TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Crash:
    """The evidence, collected after the sink is dead."""

    planned_batch: int  # the last in Spark's log of planned batches
    committed_batch: int  # the last in its log of committed batches
    planned_end: int  # the end of the planned batch: the sum of its offsets over the topics and partitions
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
        self._watcher = connect(settings, SinkRole.AUDITOR)
        self._watcher.autocommit = True
        self._holders = {name: connect(settings, SinkRole.AUDITOR) for name in names}
        self._checkpoints = {name: Checkpoint(settings, name, self._generation(name)) for name in names}

    def close(self) -> None:
        """Release what is held. Sinks that wait go on."""
        for connection in (*self._holders.values(), self._watcher):
            connection.close()

    def kill_in_it(self, burst: Callable[[], None]) -> dict[str, Crash]:
        """Restart the sinks, let ``burst`` bring events that one batch holds, and kill the sinks in the window.

        Returns the evidence by sink. The sinks are dead, or start again by themselves.
        """
        for name in self._names:
            self._hold(name)
        self._sinks.restart()
        burst()
        at_last_part = {name: partial(self._comes_to_last_part, name, self._planned(name)) for name in self._names}
        self._let_them_start(at_last_part)
        self._wait("each sink to bring a batch", lambda: all(one() for one in at_last_part.values()))
        self._sinks.pause_spark()
        for name in self._names:
            self._release(name)
        self._wait("the sinks to commit", lambda: all(map(self._has_applied, self._names)))
        self._sinks.kill()
        return {name: self._evidence(name) for name in self._names}

    def wait_replayed(self, crashes: dict[str, Crash]) -> None:
        """Wait until the restarted sinks have processed the batch of the crash again."""
        for name, crash in crashes.items():
            self._wait(f"sink {name} to replay its batch", partial(self._has_committed, name, crash.planned_batch))

    # ----------------------------------------------------------------------------------------------------------------

    def _hold(self, name: str) -> None:
        with self._holders[name].cursor() as cursor:
            fence.lock(cursor, name)

    def _release(self, name: str) -> None:
        self._holders[name].rollback()

    def _let_them_start(self, at_last_part: Mapping[str, Callable[[], bool]]) -> None:
        """Release the locks, and take each again as soon as its sink has become the driver.

        A sink needs more than one transaction to start, and another sink of its process starts behind it.
        """
        epoch = {name: self._epoch(name) for name in self._names}
        for name in self._names:
            self._release(name)

        def all_held_again() -> bool:
            for name in self._names:
                if name not in epoch:
                    at_last_part[name]()  # which lets the sink go on with its start
                elif self._epoch(name) > epoch[name]:
                    self._hold(name)
                    del epoch[name]
            return not epoch

        self._wait("the sinks to acquire their fences", all_held_again)

    def _wait(self, what: str, condition: Callable[[], bool]) -> None:
        wait_for(what, condition, timeout_s=TIMEOUT_S, needs=self._sinks.require_running)

    def _comes_to_last_part(self, name: str, before: int) -> bool:
        """Whether a sink waits with the last transaction of a batch that Spark planned after the one ``before``.

        If it waits with an earlier transaction, let it commit that one: of another topic of the batch, or of the batch
        that it repeats after its restart.
        """
        with self._watcher.cursor() as cursor:
            if not fence.driver_waits(cursor, name):
                return False
        if self._planned(name) > before and len(self._left(name)) == 1:
            return True
        self._release(name)
        self._hold(name)  # we are behind the sink in the queue for the lock
        return False

    def _left(self, name: str) -> list[str]:
        """The topics of the last planned batch that the sink has yet to apply."""
        position = self._positions(name)
        return [topic for topic, end in self._planned_ends(name).items() if position.get(topic, 0) < end]

    def _has_applied(self, name: str) -> bool:
        return self._positions(name) == self._planned_ends(name)

    def _evidence(self, name: str) -> Crash:
        return Crash(
            planned_batch=self._planned(name),
            committed_batch=self._checkpoints[name].committed(),
            planned_end=sum(self._planned_ends(name).values()),
            position=sum(self._positions(name).values()),
        )

    def _planned(self, name: str) -> int:
        return self._checkpoints[name].planned()

    def _has_committed(self, name: str, batch: int) -> bool:
        return self._checkpoints[name].committed() >= batch

    def _planned_ends(self, name: str) -> dict[str, int]:
        """By topic where the last planned batch ends: the sum of its offsets over the partitions."""
        ends = self._checkpoints[name].ends(self._planned(name))
        return {topic: sum(offsets.values()) for topic, offsets in ends.items()}

    def _positions(self, name: str) -> dict[str, int]:
        """By topic the position in the sink's database, as such a sum."""
        with self._watcher.cursor() as cursor:
            cursor.execute(
                "SELECT topic, sum(next_offset) FROM public.positions WHERE sink = %s GROUP BY topic", [name]
            )
            return {topic: int(total) for topic, total in cursor}

    def _generation(self, name: str) -> int:
        return self._one("SELECT generation FROM public.sinks WHERE name = %s", name)

    def _epoch(self, name: str) -> int:
        return self._one("SELECT epoch FROM public.sinks WHERE name = %s", name)

    def _one(self, query: str, name: str) -> int:
        """The number that a query about a sink returns; 0 without a row."""
        with self._watcher.cursor() as cursor:
            cursor.execute(query, [name])
            row = cursor.fetchone()
            return int(row[0]) if row else 0
