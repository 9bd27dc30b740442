"""Kill the sinks in the window that matters: their database has committed, Spark has not.

It needs no hook in the sinks, and there is no race. Hold the lock that each transaction of a sink takes, until every
sink waits there with its batch. Freeze Spark's JVM. Release the locks: the sinks commit to their database, and Spark
cannot record it. Kill both.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from outbox.base.database import connect
from outbox.base.settings import Settings, SinkRole
from outbox.base.wait import wait_for
from outbox.sink import fence
from outbox.stack.process import Process
from psycopg2.extensions import connection as Connection  # noqa: N812

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


def kill_before_offsets(process: Process, names: Sequence[str], settings: Settings) -> dict[str, Crash]:
    """Start stopped sinks in one process, and kill it after the next database commit of each and before Spark's.

    The sinks must have something to read. Returns the evidence by sink.
    """
    checkpoints = {name: _checkpoint(settings, name) for name in names}
    holder, watcher = connect(settings, SinkRole.AUDITOR), connect(settings, SinkRole.AUDITOR)
    watcher.autocommit = True
    try:
        position = {name: _position(watcher, name) for name in names}
        epoch = {name: _epoch(watcher, name) for name in names}
        planned = {name: _last(checkpoints[name] / "offsets") for name in names}
        process.spawn()
        _wait(
            "the sinks to acquire their fences",
            lambda: all(_epoch(watcher, name) > epoch[name] for name in names),
            process,
        )
        with holder.cursor() as cursor:
            for name in names:
                fence.lock(cursor, name)  # while Spark starts
        _wait(
            "each sink to bring a batch",
            lambda: (
                _waiting(watcher) == len(names)
                and all(_last(checkpoints[name] / "offsets") > planned[name] for name in names)
            ),
            process,
        )
        driver = process.pid()
        for each in process.processes():
            if each.pid != driver:
                each.suspend()
        holder.rollback()
        _wait("the sinks to commit", lambda: all(_position(watcher, name) > position[name] for name in names), process)
        process.kill()
        return {name: _evidence(checkpoints[name], _position(watcher, name)) for name in names}
    finally:
        holder.close()
        watcher.close()


def wait_replayed(process: Process, name: str, settings: Settings, crash: Crash) -> None:
    """Wait until a sink of the restarted process has processed the batch of the crash again."""
    commits = _checkpoint(settings, name) / "commits"
    _wait(f"sink {name} to replay its batch", lambda: _last(commits) >= crash.planned_batch, process)


def _wait(what: str, condition: Callable[[], bool], process: Process) -> None:
    wait_for(what, condition, timeout_s=TIMEOUT_S, needs=process.require_running)


def _evidence(checkpoint: Path, position: int) -> Crash:
    newest = _last(checkpoint / "offsets")
    return Crash(
        planned_batch=newest,
        committed_batch=_last(checkpoint / "commits"),
        planned_end=_end(checkpoint / "offsets" / str(newest)),
        position=position,
    )


def _checkpoint(settings: Settings, name: str) -> Path:
    return Path(settings.checkpoints.removeprefix("file://")) / name


def _waiting(connection: Connection) -> int:
    """How many sessions wait for an advisory lock in this database."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(*) FROM pg_locks JOIN pg_database ON pg_database.oid = database"
            " WHERE datname = current_database() AND locktype = 'advisory' AND NOT granted"
        )
        row = cursor.fetchone()
        return int(row[0]) if row else 0


def _position(connection: Connection, name: str) -> int:
    with connection.cursor() as cursor:
        cursor.execute("SELECT coalesce(sum(next_offset), 0) FROM positions WHERE sink = %s", [name])
        row = cursor.fetchone()
        return int(row[0]) if row else 0


def _epoch(connection: Connection, name: str) -> int:
    with connection.cursor() as cursor:
        cursor.execute("SELECT epoch FROM sinks WHERE name = %s", [name])
        row = cursor.fetchone()
        return int(row[0]) if row else 0


def _last(log: Path) -> int:
    """The last batch in a log of a Spark checkpoint; -1 if there is none."""
    return max((int(entry.name) for entry in log.glob("[0-9]*")), default=-1)


def _end(planned: Path) -> int:
    """The sum of the offsets where a planned batch ends. The last line of its file has them by topic and partition."""
    by_topic = json.loads(planned.read_text().splitlines()[-1])
    return sum(offset for partitions in by_topic.values() for offset in partitions.values())
