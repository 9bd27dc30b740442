"""A turn between the batches of running sinks."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TypeVar

import psycopg2
from psycopg2 import extensions

from outbox.base.errors import Failure
from outbox.base.wait import WaitTimeoutError, wait_for
from outbox.sink.remembering import fence

T = TypeVar("T")

# Longer than the server's deadlock_timeout of 1 s, after which an autovacuum gives way.
LOCK_TIMEOUT_S = 2
TURN_TIMEOUT_S = 60.0


def between_batches(
    connection: extensions.connection, sinks: Callable[[extensions.cursor], Collection[str]], action: Callable[..., T]
) -> T:
    """Call ``action(cursor)`` in one transaction that holds the apply lock of every sink that ``sinks(cursor)`` names.

    So it meets no sink in the middle of a batch, and cannot deadlock with one. Nor does a sink wait for long: the
    transaction gives up after `LOCK_TIMEOUT_S` without a lock, and is tried again. Raises Failure, with nothing
    changed, if it got no turn within `TURN_TIMEOUT_S`.
    """
    holder = "a sink is starting"

    def attempt() -> list[T]:
        nonlocal holder
        try:
            with connection, connection.cursor() as cursor:
                cursor.execute("SELECT set_config('lock_timeout', %s, true)", [f"{LOCK_TIMEOUT_S}s"])
                for sink in sorted(sinks(cursor)):
                    holder = f"sink {sink} is in a transaction"
                    fence.lock(cursor, sink)
                holder = "another session uses the tables"
                return [action(cursor)]
        except psycopg2.errors.LockNotAvailable:
            return []

    try:
        (result,) = wait_for("the sinks to be between two batches", attempt, timeout_s=TURN_TIMEOUT_S, poll_s=0.2)
    except WaitTimeoutError:
        raise Failure(
            f"retention stopped: {holder} and does not end it", "end that session, and prune again", code="sinks-busy"
        ) from None
    return result
