"""Append events to the outbox, in the transaction of the change that they tell about: the whole trick.

    with engine.begin() as connection:          # or: with Session(engine) as session, session.begin():
        connection.execute(...)                 # the change
        append(connection, Event("order", order_id, "placed", {"order_id": order_id}))

Both are committed or neither is. Debezium reads the committed rows from the write-ahead log and sends each to Kafka at
least once, so an event needs nothing but this row: never send it yourself as well.

With asyncio: ``await session.run_sync(append, event)``; an AsyncConnection has the same method. Without SQLAlchemy:
`outbox.dbapi`.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Text, bindparam, cast, column, table
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Session, scoped_session

from outbox.writing.event import COLUMNS, Event, appending, require_transaction, rows

__all__ = ["Event", "append"]

_OUTBOX = table("outbox", *map(column, COLUMNS), schema="public")
# inline: no RETURNING, which a role that may only INSERT is refused. The payload is JSON text already: the type JSONB
# would encode it by Python's json, which knows no Decimal.
_INSERT = _OUTBOX.insert().inline().values(payload=cast(bindparam("payload_text", type_=Text), JSONB))


def append(target: Connection | Session | scoped_session[Any], *events: Event) -> None:
    """Insert the events, in this order, in the transaction of a connection or of an ORM session. Never commits.

    The database gives each its id (a UUIDv7) and its time.

    Each event is checked first, by its declaration in ``connect/events``; if one is refused, none is written. Raises
    Failure `event-undeclared` and `event-deprecated`; `event-invalid`, which names the property; `event-key-mismatch`;
    and `not-in-a-transaction` for a connection in autocommit mode. Raises TypeError for an asyncio connection or
    session itself, which would insert nothing, and SQLAlchemy's IntegrityError for a payload of more than a megabyte,
    which would not fit into a record.
    """
    connection = target.connection() if isinstance(target, Session | scoped_session) else target
    if not isinstance(connection, Connection):
        raise TypeError(
            f"append takes a Connection or a Session, not {type(target).__name__};"
            " with asyncio: await session.run_sync(append, event)"
        )
    if events:
        require_transaction(connection.connection.dbapi_connection)
        with appending(events) as found:
            connection.execute(_INSERT, [_parameters(row) for row in rows(found)])


def _parameters(row: dict[str, Any]) -> dict[str, Any]:
    return {"payload_text" if name == "payload" else name: value for name, value in row.items()}
