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
    TIMEOUTS,
    TRANSACTION_TIMEOUT,
    TRANSACTION_TIMEOUT_SINCE,
    pool_options,
)

SESSION_SETTINGS = {**SESSION, **TIMEOUTS, "application_name": "service"}
# Of Postgres' messages: kind, length, and for kind R which step of a login it is; and an error with its fields.
HEAD = struct.Struct("!cII")
SCRAM_STEPS = (10, 11, 12, 0)  # the server asks, continues, proves that it knows the password, and lets us in
NO_STEP = (-1,)
FIELDS = b"SFATAL\0VFATAL\0C28000\0Mthe server does not ask for the password by SCRAM\0\0"
REFUSAL = struct.pack("!cI", b"E", 4 + len(FIELDS)) + FIELDS


class ScramSettings(dict[str, str]):
    """Settings of a session to which only a login by SCRAM may lead."""


class ScramProtocol(asyncpg.protocol.Protocol):
    """asyncpg's side of a connection, which gives no password away: libpq's `require_auth`, which asyncpg lacks.

    A connection whose settings are no `ScramSettings` is as without us.
    """

    def __init__(self, address: Any, connected: Any, parameters: Any, *others: Any) -> None:
        super().__init__(address, connected, parameters, *others)
        self._held = b""
        self._due: tuple[int, ...] = SCRAM_STEPS if isinstance(parameters.server_settings, ScramSettings) else ()

    def data_received(self, data: Any) -> None:
        super().data_received(self._checked(data) if self._due else data)

    def _checked(self, data: bytes) -> bytes:
        """The whole messages so far, as long as each is the next step of SCRAM or an error; else a refusal."""
        held, end = self._held + data, 0
        while self._due and len(held) - end >= HEAD.size:
            kind, length, step = HEAD.unpack_from(held, end)
            if kind != b"E" and (kind, step) != (b"R", self._due[0]):
                self._due, self._held = NO_STEP, b""
                return held[:end] + REFUSAL
            if len(held) - end <= length:
                break
            end += 1 + length
            self._due = NO_STEP if kind == b"E" else self._due[1:]
        end = end if self._due else len(held)
        self._held = held[end:]
        return held[:end]


asyncpg.protocol.Protocol = ScramProtocol  # type: ignore[misc, assignment]  # asyncpg makes each connection with it


def make_async_engine(settings: Settings) -> AsyncEngine:
    """The engine of one process. It connects when it is first used, and belongs to the loop that runs then."""
    engine = create_async_engine(
        "postgresql+asyncpg://",
        async_creator=partial(_connect, settings),
        **pool_options(settings),
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
