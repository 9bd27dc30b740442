"""The service's pool of connections to the ledger: every wait is bounded, and it outlives restarts of the server."""

from __future__ import annotations

import select
from typing import Any

import psycopg2
from psycopg2 import errors
from sqlalchemy import Engine, create_engine, event
from sqlalchemy.exc import DBAPIError, InvalidatePoolError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from outbox.settings import LedgerRole, Settings

CONNECT_TIMEOUT_S = 3
POOL_TIMEOUT_S = 3
LOCK_TIMEOUT_S = 3
STATEMENT_TIMEOUT_S = 5
TRANSACTION_TIMEOUT_S = 10
# A host that vanished without a word is noticed after so long.
TCP_TIMEOUT_S = 10


def make_engine(settings: Settings) -> Engine:
    """The engine of one process, with a connection for each of its threads. Connects when first used."""
    engine = create_engine(
        "postgresql+psycopg2://",
        connect_args={
            **settings.dsn(LedgerRole.APP),
            "application_name": "ledger",
            "connect_timeout": CONNECT_TIMEOUT_S,
            "tcp_user_timeout": TCP_TIMEOUT_S * 1000,
            "keepalives_idle": TCP_TIMEOUT_S,
            "keepalives_interval": 2,
            "keepalives_count": 3,
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


def is_unavailable(error: SQLAlchemyError) -> bool:
    """Whether the database did not answer, or not now: the same request may succeed later."""
    if isinstance(error, PoolTimeoutError | OperationalError):
        return True
    # A server that became a standby refuses writes until its clients are led to the new primary.
    return isinstance(error, DBAPIError) and (
        error.connection_invalidated or isinstance(error.orig, errors.ReadOnlySqlTransaction)
    )


def _require_open(connection: psycopg2.extensions.connection, *_: Any) -> None:
    """Notice that the server has closed an idle connection, without asking it: then there is something to read.

    So the first request after a restart of the database succeeds, and no request pays for a ping.
    """
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    if poll.poll(0):
        raise InvalidatePoolError
