"""Faults of single parts, for a player that lets people break the chain. Each does the real thing, with evidence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing

from outbox.base.database import connect
from outbox.base.errors import Failure
from outbox.base.settings import Settings, SourceRole
from outbox.base.wait import wait_for
from outbox.sink.repair import rewind
from outbox_lab.walkthrough.chain import Chain
from outbox_lab.walkthrough.crash import Crash, Window

CONNECTION_TIMEOUT_S = 60.0
FENCE_TIMEOUT_S = 60.0
# A role may terminate its own sessions.
TERMINATE = """
SELECT active_pid FROM pg_replication_slots WHERE slot_name = %s AND pg_terminate_backend(active_pid)
"""


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
