"""Faults of single parts, for a player that lets people break the chain. Each does the real thing, with evidence."""

from __future__ import annotations

from contextlib import closing

from outbox.base.database import connect
from outbox.base.errors import Failure
from outbox.base.settings import Settings, SourceRole
from outbox.base.wait import wait_for
from outbox.sink.repair import rewind
from outbox_lab.walkthrough.chain import Chain

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
