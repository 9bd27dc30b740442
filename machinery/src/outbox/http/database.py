"""The service's connections to its database: every wait is bounded, and the pool survives restarts of the server."""

from __future__ import annotations

import select
import time
from functools import partial
from typing import Any

import psycopg2
import psycopg2.extensions
from sqlalchemy import Engine, create_engine, event
from sqlalchemy.exc import DBAPIError, InvalidatePoolError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from outbox.base.database import SESSION, is_cut_off, login, session_options
from outbox.base.errors import Failure
from outbox.base.settings import Settings, SourceRole

CONNECT_TIMEOUT_S = 3
POOL_TIMEOUT_S = 3
TIMEOUTS = {"lock_timeout": "3s", "statement_timeout": "5s", "idle_in_transaction_session_timeout": "10s"}
TRANSACTION_TIMEOUT_SINCE = 170_000  # the version of Postgres that has it
TRANSACTION_TIMEOUT = "SET transaction_timeout = '10s'"
# The server's own timeouts do not help if the server is frozen or gone.
ANSWER_TIMEOUT_S = 8
# SQLSTATEs of what another attempt may not meet. 25006: a server that became a standby refuses writes until its clients
# are routed to the new primary.
NOT_NOW = ("08", "25006", "28", "40", "53", "55", "57", "58")


def make_engine(settings: Settings) -> Engine:
    """The engine of one process, with one connection per thread. It connects when it is first used."""
    engine = create_engine(
        "postgresql+psycopg2://",
        connect_args={
            **settings.dsn(SourceRole.APP),
            "application_name": "service",
            "connect_timeout": CONNECT_TIMEOUT_S,
            "client_encoding": "UTF8",
            "options": session_options({**SESSION, **TIMEOUTS}),
        },
        **pool_options(settings),
        use_native_hstore=False,  # saves a query per connection
    )
    if settings.db_password_command is not None:
        event.listen(engine, "do_connect", partial(_set_password, settings))
    event.listen(engine, "connect", _bound_transactions)
    event.listen(engine, "checkout", _require_open)
    return engine


def pool_options(settings: Settings) -> dict[str, Any]:
    """The options of an engine: a connection per thread, or for asyncio as many."""
    return {
        "isolation_level": "READ COMMITTED",  # a transaction locks the rows that its decision depends on
        "pool_size": settings.service_threads,
        "max_overflow": 0,
        "pool_timeout": POOL_TIMEOUT_S,
        "hide_parameters": True,  # an error would print the payloads
    }


def bound_waits() -> None:
    """Bound every wait of this process for a database server, to connect or to execute.

    psycopg2 has no timeout of its own for this. The hook applies to the whole process and excludes COPY. So only
    gunicorn's workers set it, because they run nothing but the service.
    """
    psycopg2.extensions.set_wait_callback(_wait_for_answer)


def is_unavailable(error: SQLAlchemyError) -> bool:
    """Whether the database is unavailable for now: the same request may succeed later."""
    if isinstance(error, PoolTimeoutError | OperationalError):
        return True
    # SQLAlchemy has no such class for asyncpg's errors; their SQLSTATE says it.
    return isinstance(error, DBAPIError) and (
        error.connection_invalidated or str(getattr(error.orig, "pgcode", None)).startswith(NOT_NOW)
    )


def _wait_for_answer(connection: psycopg2.extensions.connection) -> None:
    """psycopg2 calls this to wait; after an exception it closes the connection."""
    deadline_s = time.monotonic() + ANSWER_TIMEOUT_S
    while (state := connection.poll()) != psycopg2.extensions.POLL_OK:
        socket = select.poll()
        socket.register(connection, select.POLLIN if state == psycopg2.extensions.POLL_READ else select.POLLOUT)
        if not socket.poll(max(0.0, deadline_s - time.monotonic()) * 1000):
            raise psycopg2.OperationalError(f"no response from the server within {ANSWER_TIMEOUT_S} s")


def _set_password(settings: Settings, _dialect: object, _record: object, _: object, parameters: dict[str, Any]) -> None:
    try:
        parameters["password"] = login(settings, SourceRole.APP)["password"]
    except Failure as failure:  # the service is unavailable, as without its server
        raise psycopg2.OperationalError(str(failure)) from failure


def _bound_transactions(connection: psycopg2.extensions.connection, _record: object) -> None:
    if connection.server_version >= TRANSACTION_TIMEOUT_SINCE:
        connection.autocommit = True  # what is set in a transaction ends when that is rolled back
        with connection.cursor() as cursor:
            cursor.execute(TRANSACTION_TIMEOUT)
        connection.autocommit = False


def _require_open(connection: psycopg2.extensions.connection, *_: Any) -> None:
    """Replace an idle connection that the server has ended.

    So the first request after a restart of the database succeeds, and no request pays for a ping.
    """
    if is_cut_off(connection):
        raise InvalidatePoolError
