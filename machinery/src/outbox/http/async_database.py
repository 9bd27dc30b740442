"""The asyncio service's connections to its database, by asyncpg, with the bounds of `outbox.http.database`."""

from __future__ import annotations

import asyncio
import ssl
import struct
from functools import partial
from typing import Any
from urllib.parse import urlencode

import asyncpg
import asyncpg.protocol
from sqlalchemy import event
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.exc import InvalidatePoolError, OperationalError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from outbox.base.database import SESSION, login
from outbox.base.errors import Failure
from outbox.base.settings import SYSTEM_ROOTS, Settings, SourceRole
from outbox.http.database import (
    ANSWER_TIMEOUT_S,
    CONNECT_TIMEOUT_S,
    POOL_TIMEOUT_S,
    TIMEOUTS,
    TRANSACTION_TIMEOUT,
    TRANSACTION_TIMEOUT_SINCE,
)

SESSION_SETTINGS = {**SESSION, **TIMEOUTS, "application_name": "service"}
# Postgres' messages: a kind, their length, and of this one the number of SASL; and an error with its fields.
ASKS_FOR_SCRAM = struct.pack("!cII", b"R", 8, 10)
FIELDS = b"SFATAL\0VFATAL\0C28000\0Mthe server does not ask for the password by SCRAM\0\0"
REFUSAL = struct.pack("!cI", b"E", 4 + len(FIELDS)) + FIELDS


class ScramProtocol(asyncpg.protocol.Protocol):
    """asyncpg's side of a connection, which answers no server that asks us for the password in another way than SCRAM.

    libpq has `require_auth` for that (`Settings.dsn`), asyncpg has nothing. Connections of others are left alone.
    """

    def __init__(self, address: Any, connected: Any, parameters: Any, *others: Any) -> None:
        super().__init__(address, connected, parameters, *others)
        self._begin: bytes | None = b"" if isinstance(parameters.server_settings, ScramSettings) else None

    def data_received(self, data: Any) -> None:
        """Look at the first message of the server, which arrives in the clear or within TLS."""
        if self._begin is not None:
            data = self._begin = self._begin + data
            if len(data) < len(ASKS_FOR_SCRAM):
                return
            if data[:1] != b"E" and not (data[:1] == b"R" and data[5:9] == ASKS_FOR_SCRAM[5:]):
                data = REFUSAL
            self._begin = None
        super().data_received(data)


class ScramSettings(dict[str, str]):
    """Settings of a session whose server must ask by SCRAM."""


asyncpg.protocol.Protocol = ScramProtocol  # type: ignore[misc, assignment]  # from there asyncpg takes it for each connection


def make_async_engine(settings: Settings) -> AsyncEngine:
    """The engine of one process. It connects when it is first used, and belongs to the loop that runs then."""
    engine = create_async_engine(
        "postgresql+asyncpg://",
        async_creator=partial(_connect, settings),
        isolation_level="READ COMMITTED",  # a transaction locks the rows that its decision depends on
        pool_size=settings.service_threads,
        max_overflow=0,
        pool_timeout=POOL_TIMEOUT_S,
        hide_parameters=True,  # an error would print the payloads
    )
    event.listen(engine.sync_engine, "checkout", _require_open)
    event.listen(engine.sync_engine, "handle_error", _give_up)
    return engine


async def _connect(settings: Settings) -> Any:
    """Connect as the service's role. Raises OperationalError: the service is unavailable without its server."""
    try:
        parameters = await asyncio.to_thread(login, settings, SourceRole.APP)  # a command may print the password
        connection = await asyncpg.connect(
            _tls(parameters),
            host=str(parameters["host"]),
            port=int(parameters["port"]),
            user=str(parameters["user"]),
            password=str(parameters["password"]),
            database=str(parameters["dbname"]),
            ssl=ssl.create_default_context() if parameters.get("sslrootcert") == str(SYSTEM_ROOTS) else None,
            timeout=CONNECT_TIMEOUT_S,
            command_timeout=ANSWER_TIMEOUT_S,
            server_settings=(ScramSettings if "require_auth" in parameters else dict)(SESSION_SETTINGS),
        )
        version = connection.get_server_version()
        if version.major * 10_000 >= TRANSACTION_TIMEOUT_SINCE:
            await connection.execute(TRANSACTION_TIMEOUT)
    except (Failure, OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        raise OperationalError("connect", None, error) from error
    return connection


def _tls(parameters: dict[str, str | int]) -> str:
    """libpq's parameters of TLS, which asyncpg reads from an address alone."""
    named: dict[str, str] = {name: str(value) for name, value in parameters.items() if name.startswith("ssl")}
    return "postgresql://" if named.get("sslrootcert") == str(SYSTEM_ROOTS) else f"postgresql:///?{urlencode(named)}"


def _give_up(context: ExceptionContext) -> None:
    """Break a connection whose server is frozen or gone. asyncpg would wait for it once more, to cancel and to close.

    Raises OperationalError in place of a TimeoutError, or another OSError, of the driver.
    """
    error = context.original_exception
    if isinstance(error, OSError):
        context.is_disconnect = True
        if context.connection is not None:
            driver: Any = context.connection.connection.driver_connection
            driver.terminate()
        raise OperationalError(context.statement, None, error, connection_invalidated=True) from error


def _require_open(connection: Any, *_: Any) -> None:
    """Replace an idle connection that the server has ended: the first request after a restart succeeds."""
    if connection.driver_connection.is_closed():
        raise InvalidatePoolError
