"""An event as a service writes it, and the transaction that it must be written in; only the standard library."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from outbox.base.errors import Failure

IDLE = 0  # libpq's PQTRANS_IDLE: no transaction is open


@dataclass(frozen=True)
class Event:
    """One event. Kafka keeps the order of events with the same ``aggregateid``, which is their key.

    Its declaration is the file ``connect/events/<aggregatetype>/<type>.v<schema_version>.schema.json``. The fields are
    the columns that every ``append`` writes. The database adds the id (a UUIDv7) and the time.
    """

    aggregatetype: str
    aggregateid: str
    type: str
    payload: Any
    """A mapping, a dataclass, a msgspec Struct or a pydantic model; `append` writes it as JSON."""
    schema_version: int = 1
    traceparent: str | None = None  # W3C trace context of the request that caused it


def require_transaction(connection: Any) -> None:
    """Raise Failure `not-in-a-transaction` if a driver's connection would commit a statement by itself.

    It would if it is in autocommit mode and no transaction is open. Drivers without the attribute ``autocommit``, which
    DB-API does not require, are in a transaction always. Drivers that do not report the status of the transaction are
    taken to have none open.
    """
    status = getattr(getattr(connection, "info", None), "transaction_status", IDLE)
    if getattr(connection, "autocommit", False) and status == IDLE:
        raise Failure(
            "append: the connection is in autocommit mode, which would commit the events without the change",
            "begin a transaction: engine.begin(), transaction.atomic(), or autocommit = False",
            code="not-in-a-transaction",
        )
