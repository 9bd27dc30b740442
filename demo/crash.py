"""Kill a sink in the one window that matters: its database has committed, Spark has not.

No hook in the sink: we watch its position in the database, freeze the process the moment it moves, look at Spark's
checkpoint, and kill it only if the batch is still open there. Else it goes on, and the next batch is tried.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from outbox.database import connect
from outbox.errors import Failure
from outbox.settings import BalancesRole, Settings
from outbox.stack.process import Process
from outbox.wait import wait_for

WINDOW_TIMEOUT_S = 120.0
POLL_S = 0.0005


@dataclass(frozen=True)
class Crash:
    """The evidence: the batch that Spark had planned, and the last that it had committed, when the sink was killed."""

    planned_batch: int
    committed_batch: int

    @property
    def fired(self) -> bool:
        """The batch was in the sink's database and still open in the checkpoint."""
        return self.planned_batch > self.committed_batch


def kill_before_offsets(sink: Process, name: str, settings: Settings) -> Crash:
    """Kill a running sink after its next database commit, and say whether it was before Spark's.

    ``fired`` is false if Spark was faster than we; then the sink has been let go on.
    """
    checkpoint = Path(unquote(urlsplit(settings.checkpoints).path)) / name
    driver = sink.pid()
    if driver is None:
        raise Failure(f"{sink.name} does not run", f"its log is {sink.log_file}")
    before = _position(settings, name)
    connection = connect(settings, BalancesRole.SINK)
    try:
        connection.autocommit = True
        with connection.cursor() as cursor:

            def moved() -> bool:
                cursor.execute("SELECT coalesce(sum(next_offset), 0) FROM positions WHERE sink = %s", [name])
                row = cursor.fetchone()
                return row is not None and int(row[0]) > before

            wait_for(f"sink {name} to commit to its database", moved, timeout_s=WINDOW_TIMEOUT_S, poll_s=POLL_S)
            # The driver commits, and Spark's JVM waits for it to return: one signal holds both. Not sink.pause(), which
            # looks the processes up first: that takes longer than the window is open.
            os.kill(driver, signal.SIGSTOP)
    finally:
        connection.close()
    if _crash(checkpoint).fired:
        sink.kill()
    else:
        sink.resume()
    return _crash(checkpoint)


def _crash(checkpoint: Path) -> Crash:
    return Crash(_last(checkpoint / "offsets"), _last(checkpoint / "commits"))


def _position(settings: Settings, name: str) -> int:
    connection = connect(settings, BalancesRole.SINK)
    try:
        with connection.cursor() as cursor:
            cursor.execute("SELECT coalesce(sum(next_offset), 0) FROM positions WHERE sink = %s", [name])
            row = cursor.fetchone()
            return int(row[0]) if row else 0
    finally:
        connection.close()


def _last(log: Path) -> int:
    """The newest batch of a log of a Spark checkpoint; -1 if it has none."""
    return max((int(entry.name) for entry in log.glob("[0-9]*")), default=-1)
