"""Kill a sink in the one window that matters: its database has committed, Spark has not.

No hook in the sink and no race: we hold the lock that each of its transactions takes, until it waits there with its
batch; freeze Spark's JVM; let go of the lock, so that the sink commits to its database and finds nobody to tell; and
kill both.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from psycopg2.extensions import connection as Connection  # noqa: N812

from outbox.database import connect
from outbox.settings import BalancesRole, Settings
from outbox.sink import fence
from outbox.stack.process import Process
from outbox.wait import wait_for

TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Crash:
    """The evidence, once the sink is dead."""

    planned_batch: int  # the newest in Spark's log of planned batches
    committed_batch: int  # the newest in its log of committed ones
    planned_end: int  # where the planned batch ends: offsets, added up over the partitions
    position: int  # how far the sink's database is, likewise

    @property
    def fired(self) -> bool:
        """The batch is in the sink's database, and Spark does not know."""
        return self.planned_batch > self.committed_batch and self.position == self.planned_end


def kill_before_offsets(sink: Process, name: str, settings: Settings) -> Crash:
    """Start a stopped sink that has something to read, and kill it after its next database commit, before Spark's."""
    checkpoint = _checkpoint(settings, name)
    holder, watcher = connect(settings, BalancesRole.AUDITOR), connect(settings, BalancesRole.AUDITOR)
    watcher.autocommit = True
    try:
        position, epoch, planned = _position(watcher, name), _epoch(watcher, name), _last(checkpoint / "offsets")
        sink.spawn()
        wait_for(f"sink {name} to take its fence", lambda: _epoch(watcher, name) > epoch, timeout_s=TIMEOUT_S)
        with holder.cursor() as cursor:
            fence.lock(cursor, name)  # while Spark starts
        wait_for(
            f"sink {name} to bring a batch",
            lambda: _waits(watcher) and _last(checkpoint / "offsets") > planned,
            timeout_s=TIMEOUT_S,
        )
        driver = sink.pid()
        for process in sink.processes():
            if process.pid != driver:
                process.suspend()
        holder.rollback()
        wait_for(f"sink {name} to commit", lambda: _position(watcher, name) > position, timeout_s=TIMEOUT_S)
        sink.kill()
        newest = _last(checkpoint / "offsets")
        return Crash(
            planned_batch=newest,
            committed_batch=_last(checkpoint / "commits"),
            planned_end=_end(checkpoint / "offsets" / str(newest)),
            position=_position(watcher, name),
        )
    finally:
        holder.close()
        watcher.close()


def wait_replayed(name: str, settings: Settings, crash: Crash) -> None:
    """Wait until the sink, started again, has been through the batch of the crash a second time."""
    commits = _checkpoint(settings, name) / "commits"
    wait_for(f"sink {name} to replay its batch", lambda: _last(commits) >= crash.planned_batch, timeout_s=TIMEOUT_S)


def _checkpoint(settings: Settings, name: str) -> Path:
    return Path(settings.checkpoints.removeprefix("file://")) / name


def _waits(connection: Connection) -> bool:
    """Whether somebody waits for an advisory lock in this database."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT EXISTS (SELECT FROM pg_locks JOIN pg_database ON pg_database.oid = database"
            " WHERE datname = current_database() AND locktype = 'advisory' AND NOT granted)"
        )
        row = cursor.fetchone()
        return bool(row and row[0])


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
    """The newest batch of a log of a Spark checkpoint; -1 if it has none."""
    return max((int(entry.name) for entry in log.glob("[0-9]*")), default=-1)


def _end(planned: Path) -> int:
    """The offsets where a planned batch ends, added up: the last line of its file, by topic and partition."""
    by_topic = json.loads(planned.read_text().splitlines()[-1])
    return sum(offset for partitions in by_topic.values() for offset in partitions.values())
