"""The fence: one driver per sink.

A driver holds a session lock on the connection that it applies with, so it loses the lock and the ability to write
together. Postgres frees the lock when the connection ends, and detects within `DEAD_HOST_S` that the driver's host is
gone. In addition each start increments the sink's epoch, and every transaction checks it. Behind a pooler that swaps
sessions the lock means little; there the newest driver wins and the older one stops.

A repair that sets where the sink continues increments the epoch too, and the generation of its checkpoint with it. The
driver stops there likewise, but nobody has taken its place: it may start again.

Session locks need a connection of the driver's own: connect directly, or through a pooler in session mode.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from outbox.base.errors import Failure
from outbox.base.heavy import extensions, psycopg2

Holder = tuple[str, int, str]  # address, backend and start of a driver's connection

DEAD_HOST_S = 30
LOCK_TIMEOUT_S = 60
GRACE_S = 3  # a driver that has just ended may hold its lock for another moment

SESSION = f"""
SET tcp_keepalives_idle = {DEAD_HOST_S // 2};
SET tcp_keepalives_interval = 5;
SET tcp_keepalives_count = 3;
SET tcp_user_timeout = '{DEAD_HOST_S}s';
SET lock_timeout = '{LOCK_TIMEOUT_S}s';
"""
DRIVER_KEY = "hashtextextended('outbox driver of sink ' || %(sink)s, 0)"
APPLY_KEY = "hashtextextended('outbox apply to sink ' || %(sink)s, 0)"
CREATION_KEY = "hashtextextended('outbox creation of sinks', 0)"
EPOCH = "SELECT epoch, generation, pg_backend_pid() FROM public.sinks WHERE name = %s"
HOLDER = f"""
SELECT coalesce(host(client_addr), 'local'), pid, date_trunc('second', backend_start)
  FROM pg_locks JOIN pg_stat_activity USING (pid)
 WHERE locktype = 'advisory' AND objsubid = 1 AND granted AND datname = current_database()
   AND (classid::bigint << 32 | objid::bigint) = {DRIVER_KEY}
"""  # noqa: S608


class Term(NamedTuple):
    """The values that a driver finds unchanged as long as nobody has taken the sink over."""

    epoch: int
    generation: int  # of the sink's checkpoint


def acquire(connection: extensions.connection, sink: str) -> Term:
    """Become the driver of a sink for as long as the connection lives, and return its term.

    Raises Failure if another driver holds the sink.
    """
    if not hold_for_session(connection, sink, DRIVER_KEY):
        with connection, connection.cursor() as cursor:
            address, pid, since = driver(cursor, sink) or ("?", "?", "?")
        raise Failure(
            f"sink {sink} already has a driver, connected from {address} since {since}, backend {pid}",
            f"stop that one; if its host died, wait {DEAD_HOST_S} s for Postgres to notice",
            code="sink-has-driver",
        )
    with connection, connection.cursor() as cursor:
        lock_new(cursor, sink)
        cursor.execute(
            "INSERT INTO public.sinks (name, epoch) VALUES (%(sink)s, 1) "
            "ON CONFLICT (name) DO UPDATE SET epoch = sinks.epoch + 1 RETURNING epoch, generation",
            {"sink": sink},
        )
        [row] = cursor
        return Term(*row)


def hold_for_session(connection: extensions.connection, sink: str, key: str) -> bool:
    """Hold a lock of a sink for as long as the connection lives. Returns False if another connection keeps it.

    Also sets what the session of a driver or a repair needs.
    """
    with connection, connection.cursor() as cursor:
        cursor.execute(SESSION)
    try:
        with connection, connection.cursor() as cursor:
            cursor.execute(f"SET LOCAL lock_timeout = '{GRACE_S}s'")
            cursor.execute(f"SELECT pg_advisory_lock({key})", {"sink": sink})
    except psycopg2.errors.LockNotAvailable:
        return False
    return True


def driver(cursor: extensions.cursor, sink: str) -> Holder | None:
    """Who drives the sink, as far as the asking role may see; None if nobody does."""
    cursor.execute(HOLDER, {"sink": sink})
    return cursor.fetchone()


def lock(cursor: extensions.cursor, sink: str) -> None:
    """Hold the sink's lock until the end of the transaction; wait while another session holds it.

    Whatever writes for a sink, its driver or a repair command, takes this lock first.
    """
    cursor.execute(f"SELECT pg_advisory_xact_lock({APPLY_KEY})", {"sink": sink})


def lock_shared(cursor: extensions.cursor, sink: str) -> None:
    """Hold the sink's lock together with others that hold it so, until the end of the transaction: workers of a driver,
    each of which writes for keys of its own.
    """
    cursor.execute(f"SELECT pg_advisory_xact_lock_shared({APPLY_KEY})", {"sink": sink})


def lock_new(cursor: extensions.cursor, sink: str) -> None:
    """Hold the lock of a sink that this transaction may create. Waits for a transaction that has listed `all_sinks`."""
    cursor.execute(f"SELECT pg_advisory_xact_lock_shared({CREATION_KEY})")
    lock(cursor, sink)


def all_sinks(cursor: extensions.cursor) -> list[str]:
    """The names of all sinks. No other is created before the end of the transaction."""
    cursor.execute(f"SELECT pg_advisory_xact_lock({CREATION_KEY})")
    cursor.execute("SELECT name FROM public.sinks")
    return [name for (name,) in cursor]


@contextmanager
def held(connection: extensions.connection, sink: str) -> Iterator[None]:
    """Hold the sink's lock for a block of several transactions.

    After an error the lock stays until the connection ends, because nobody knows what was done.
    """
    with connection, connection.cursor() as cursor:
        cursor.execute(f"SELECT pg_advisory_lock({APPLY_KEY})", {"sink": sink})
    yield
    with connection, connection.cursor() as cursor:
        cursor.execute(f"SELECT pg_advisory_unlock({APPLY_KEY})", {"sink": sink})


@contextmanager
def between_transactions(cursor: extensions.cursor, sink: str) -> Iterator[None]:
    """Commit the caller's transaction, which has the lock, and begin another one with the lock after the block.

    The lock is held all the time, and no transaction is open within the block. After an error the lock stays until the
    connection ends.
    """
    cursor.execute(f"SELECT pg_advisory_lock({APPLY_KEY})", {"sink": sink})
    cursor.connection.commit()
    yield
    lock(cursor, sink)
    cursor.execute(f"SELECT pg_advisory_unlock({APPLY_KEY})", {"sink": sink})


def require_term(cursor: extensions.cursor, sink: str, term: Term) -> None:
    """Raises Failure `sink-fenced` if a later driver has taken the sink over, and `sink-superseded` if it was a repair
    that has set where the sink continues. Call it with the lock held.
    """
    cursor.execute(EPOCH, (sink,))
    [(epoch, generation, pid)] = cursor
    if epoch == term.epoch:
        return
    holder = driver(cursor, sink)
    # Each repair adds one to both; each start of a driver adds one to the epoch alone. The lock alone would not do:
    # behind a pooler two drivers may share the session that has it, and would take the sink from each other forever.
    if holder and holder[1] == pid and epoch - term.epoch == generation - term.generation:
        raise Failure(
            f"sink {sink} was set to continue elsewhere, by `outbox rebuild`",
            "the sink starts again by itself, unless --until-caught-up is given",
            code="sink-superseded",
        )
    raise Failure(
        f"sink {sink} was taken over by a later driver (epoch {epoch}, ours {term.epoch})",
        "leave it to that one",
        code="sink-fenced",
    )


def supersede(cursor: extensions.cursor, sink: str) -> None:
    """Make a running driver stop at its next batch, in the caller's transaction with the lock held.

    Start the sink's next generation in the same transaction: without it the driver takes us for another driver.
    """
    cursor.execute("UPDATE public.sinks SET epoch = epoch + 1 WHERE name = %s", (sink,))
