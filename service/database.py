"""The service's pool of connections to the ledger: every wait is bounded, and it outlives restarts of the server."""

from __future__ import annotations

import select
import time
from typing import Any

import psycopg2
import psycopg2.extensions
from psycopg2 import errors
from sqlalchemy import Engine, create_engine, event
from sqlalchemy.exc import DBAPIError, InvalidatePoolError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from outbox.base.settings import Settings, SourceRole

CONNECT_TIMEOUT_S = 3
POOL_TIMEOUT_S = 3
LOCK_TIMEOUT_S = 3
STATEMENT_TIMEOUT_S = 5
TRANSACTION_TIMEOUT_S = 10
# A server that vanished, or froze, says nothing any more, so its own timeouts do not help.
ANSWER_TIMEOUT_S = 8


def make_engine(settings: Settings) -> Engine:
    """The engine of one process, with a connection for each of its threads. Connects when first used."""
    engine = create_engine(
        "postgresql+psycopg2://",
        connect_args={
            **settings.dsn(SourceRole.APP),
            "application_name": "ledger",
            "connect_timeout": CONNECT_TIMEOUT_S,
            "options": f"-c lock_timeout={LOCK_TIMEOUT_S}s -c statement_timeout={STATEMENT_TIMEOUT_S}s"
            f" -c transaction_timeout={TRANSACTION_TIMEOUT_S}s",
        },
        isolation_level="READ COMMITTED",  # rows are locked before they are judged; see transfer.py
        pool_size=settings.service_threads,
        max_overflow=0,
        pool_timeout=POOL_TIMEOUT_S,
        use_native_hstore=False,  # would be a query at each connect
    )
    event.listen(engine, "checkout", _require_open)
    return engine


def bound_waits() -> None:
    """Bound every wait for the server's answer in this process, to connect or to execute.

    psycopg2 has no other timeout of its own. The hook is the whole process's and rules COPY out, so it is set where the
    service has a process to itself: in gunicorn's workers.
    """
    psycopg2.extensions.set_wait_callback(_wait_for_answer)


def is_unavailable(error: SQLAlchemyError) -> bool:
    """Whether the database did not answer, or not now: the same request may succeed later."""
    if isinstance(error, PoolTimeoutError | OperationalError):
        return True
    # A server that became a standby refuses writes until its clients are led to the new primary.
    return isinstance(error, DBAPIError) and (
        error.connection_invalidated or isinstance(error.orig, errors.ReadOnlySqlTransaction)
    )


def _wait_for_answer(connection: psycopg2.extensions.connection) -> None:
    """psycopg2 calls this when it has to wait; an exception makes it close the connection."""
    deadline_s = time.monotonic() + ANSWER_TIMEOUT_S
    while (state := connection.poll()) != psycopg2.extensions.POLL_OK:
        socket = select.poll()
        socket.register(connection, select.POLLIN if state == psycopg2.extensions.POLL_READ else select.POLLOUT)
        if not socket.poll(max(0.0, deadline_s - time.monotonic()) * 1000):
            raise psycopg2.OperationalError(f"the server has not answered for {ANSWER_TIMEOUT_S} s")


def _require_open(connection: psycopg2.extensions.connection, *_: Any) -> None:
    """Notice that the server has closed an idle connection, without asking it: then there is something to read.

    So the first request after a restart of the database succeeds, and no request pays for a ping.
    """
    socket = select.poll()
    socket.register(connection, select.POLLIN)
    if socket.poll(0):
        raise InvalidatePoolError
