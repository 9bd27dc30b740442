"""Faults of single parts, for the story and for a player that lets people break the chain; each returns evidence."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from outbox.base.database import connect
from outbox.base.errors import Failure
from outbox.base.settings import Settings, SinkRole, SourceRole
from outbox.base.wait import wait_for
from outbox.sink.remembering import fence
from outbox.sink.remembering.positions import checkpoint_folder, checkpoint_uri
from outbox.sink.repair import rewind
from outbox_lab.stack.process import Process
from outbox_lab.walkthrough.chain import Chain

TIMEOUT_S = 120.0
CONNECTION_TIMEOUT_S = 60.0
FENCE_TIMEOUT_S = 60.0
# A role may terminate its own sessions.
TERMINATE = """
SELECT active_pid FROM pg_replication_slots WHERE slot_name = %s AND pg_terminate_backend(active_pid)
"""
WAITS = "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE %s = ANY(pg_blocking_pids(pid)))"  # for that backend

Ends = dict[str, dict[int, int]]


def terminate_replication(settings: Settings) -> int:
    """Terminate Debezium's connection to Postgres, and return the server process that served it.

    Raises WaitTimeoutError if there is no such connection.
    """
    with closing(connect(settings, SourceRole.CDC)) as connection, connection, connection.cursor() as cursor:

        def terminated() -> int | None:
            cursor.execute(TERMINATE, [settings.connector])
            row = cursor.fetchone()
            return None if row is None else int(row[0])

        return wait_for("a replication connection", terminated, timeout_s=CONNECTION_TIMEOUT_S)


def rewind_sink(chain: Chain, sink: str) -> int:
    """Kill the sinks, let one of them read its topics from the beginning, and start them. Return how many records it
    reads again, transaction markers included.
    """

    def is_rewound() -> bool:
        try:
            rewind.rewind(chain.settings, sink, moves)
        except Failure as failure:
            if failure.code != "sink-has-driver":
                raise
            return False  # the database has not yet noticed that the driver is gone
        return True

    try:
        chain.sinks.kill()
        moves = rewind.to_earliest(chain.settings, sink)
        wait_for(f"sink {sink} to be without a driver", is_rewound, timeout_s=FENCE_TIMEOUT_S, poll_s=0.5)
    finally:
        chain.sinks.start()
    return sum(move.position - move.begin for move in moves.values())


# Sinks in the window that matters: their database has committed, Spark has not ------------------------------------


class Checkpoint:
    """The Spark checkpoint of one generation of a sink, in a folder: its planned and its committed batches."""

    def __init__(self, settings: Settings, sink: str, generation: int) -> None:
        """Raises Failure if the checkpoint is not in a folder of this host."""
        uri = checkpoint_uri(settings, sink, generation)
        folder = checkpoint_folder(uri)
        if folder is None:
            raise Failure(f"the checkpoint {uri} cannot be read", "use a folder", code="checkpoint-elsewhere")
        self.folder = folder
        self._planned, self._committed = folder / "offsets", folder / "commits"

    def planned(self) -> int:
        """The last planned batch; -1 before the first."""
        return _last(self._planned)

    def committed(self) -> int:
        """The last batch that Spark has recorded as committed; -1 before the first."""
        return _last(self._committed)

    def committed_at_ms(self, batch: int) -> int | None:
        """When Spark recorded a batch as committed, in Unix milliseconds; None if it has not, or not any more."""
        try:
            return (self._committed / str(batch)).stat().st_mtime_ns // 1_000_000
        except FileNotFoundError:
            return None

    def ends(self, batch: int) -> Ends:
        """By topic and partition, the offset where a planned batch ends. The last line of its file has them."""
        by_topic = json.loads((self._planned / str(batch)).read_text().splitlines()[-1])
        return {
            topic: {int(partition): offset for partition, offset in partitions.items()}
            for topic, partitions in by_topic.items()
        }


def _last(log: Path) -> int:
    return max((int(entry.name) for entry in log.glob("[0-9]*")), default=-1)


@dataclass(frozen=True)
class Crash:
    """The evidence of a crash, collected after the sink is dead."""

    planned_batch: int  # the last in Spark's log of planned batches
    committed_batch: int  # the last in its log of committed batches
    planned_end: int  # the end of the planned batch: the sum of its offsets over the topics and partitions
    position: int  # the position in the sink's database: the same sum

    @property
    def fired(self) -> bool:
        """Whether the batch is in the sink's database and Spark has not recorded it."""
        return self.planned_batch > self.committed_batch and self.position == self.planned_end


class Window:
    """The window of running sinks between the commit of their database and Spark's.

    It needs no hook in the sinks, and there is no race. Each transaction of a sink takes a lock, which we hold:

    1. Take the locks, and freeze Spark. A burst of events arrives, and no sink plans a batch with a part of it.
    2. Resume Spark. Each sink plans a batch and waits with its transaction; a batch of several topics has a transaction
       for each, and the sink waits with the last of them.
    3. Freeze Spark, and release the locks: the sinks commit to their database, and Spark cannot record it. Kill them.
    """

    def __init__(self, settings: Settings, sinks: Process, names: Sequence[str]) -> None:
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
        """Let ``burst`` bring events that one batch holds, and kill the sinks in the window.

        Returns the evidence by sink. The sinks are dead, or start again by themselves.
        """
        self._sinks.start()
        for name in self._names:
            self._hold(name)
        self._sinks.pause_children()
        before = {name: self._checkpoints[name].planned() for name in self._names}
        burst()
        self._sinks.resume()
        self._wait("each sink to bring a batch", lambda: all(self._waits_with_last(*one) for one in before.items()))
        self._sinks.pause_children()
        for name in self._names:
            self._release(name)
        self._wait("the sinks to commit", lambda: all(self._positions(name) == self._ends(name) for name in before))
        self._sinks.kill()
        return {
            name: Crash(
                planned_batch=checkpoint.planned(),
                committed_batch=checkpoint.committed(),
                planned_end=sum(self._ends(name).values()),
                position=sum(self._positions(name).values()),
            )
            for name, checkpoint in self._checkpoints.items()
        }

    def wait_replayed(self, crashes: dict[str, Crash]) -> None:
        """Wait until the restarted sinks have processed the batch of the crash again."""

        def replayed() -> bool:
            return all(self._checkpoints[name].committed() >= crash.planned_batch for name, crash in crashes.items())

        self._wait("the sinks to replay their batches", replayed)

    # ----------------------------------------------------------------------------------------------------------------

    def _hold(self, name: str) -> None:
        with self._holders[name].cursor() as cursor:
            fence.lock(cursor, name)

    def _release(self, name: str) -> None:
        self._holders[name].rollback()

    def _wait(self, what: str, condition: Callable[[], bool]) -> None:
        wait_for(what, condition, timeout_s=TIMEOUT_S, needs=self._sinks.require_running)

    def _waits_with_last(self, name: str, before: int) -> bool:
        """Whether a sink waits with the last transaction of a batch that Spark planned after the one ``before``.

        If it waits with an earlier transaction, let it commit that one: of another topic, or of the batch ``before``.
        """
        with self._watcher.cursor() as cursor:
            cursor.execute(WAITS, [self._holders[name].info.backend_pid])
            if cursor.fetchone() != (True,):
                return False
        if self._checkpoints[name].planned() > before:
            positions = self._positions(name)
            left = [topic for topic, end in self._ends(name).items() if positions.get(topic, 0) < end]
            if len(left) == 1:
                return True
        self._release(name)
        self._hold(name)  # we are behind the sink in the queue for the lock
        return False

    def _ends(self, name: str) -> dict[str, int]:
        """By topic where the last planned batch ends: the sum of its offsets over the partitions."""
        checkpoint = self._checkpoints[name]
        return {topic: sum(offsets.values()) for topic, offsets in checkpoint.ends(checkpoint.planned()).items()}

    def _positions(self, name: str) -> dict[str, int]:
        """By topic the position in the sink's database, as such a sum."""
        with self._watcher.cursor() as cursor:
            cursor.execute(
                "SELECT topic, sum(next_offset) FROM public.positions WHERE sink = %s GROUP BY topic", [name]
            )
            return {topic: int(total) for topic, total in cursor}

    def _generation(self, name: str) -> int:
        with self._watcher.cursor() as cursor:
            cursor.execute("SELECT generation FROM public.sinks WHERE name = %s", [name])
            row = cursor.fetchone()
            return int(row[0]) if row else 0


def crash_sinks(chain: Chain, sinks: Sequence[str], burst: Callable[[], None]) -> dict[str, Crash]:
    """Kill the sinks between the commit of their database and Spark's, restart them, and wait until they have processed
    the batch again. ``burst`` brings the events of that batch. Return the evidence by sink.

    After a failure the sinks run again too, whatever it has left frozen or dead.
    """
    window = Window(chain.settings, chain.sinks, sinks)
    try:
        crashes = window.kill_in_it(burst)
        chain.sinks.start()
        window.wait_replayed(crashes)
    except Exception:
        window.close()  # first: a sink that waits for its fence goes on
        chain.sinks.resume()
        chain.sinks.start()
        raise
    finally:
        window.close()
    return crashes
