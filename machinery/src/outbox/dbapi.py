"""The public API for services without SQLAlchemy: Django, psycopg 3, psycopg2, any DB-API 2 driver that writes ``%s``.

    with transaction.atomic():                  # Django; for psycopg 3: with psycopg.connect(...) as connection:
        order.save()                            # the change
        append(connection, Event("order", order_id, "placed", {"order_id": order_id}))

Beside the driver it needs msgspec and jsonschema-rs. What `outbox.writing.append` says about events is true here too.
"""

from __future__ import annotations

import inspect
from contextlib import closing
from typing import Any, Protocol

from outbox.writing.event import COLUMNS, Event, appending, require_transaction, rows

__all__ = ["Event", "append"]

# The payload is JSON text; a driver may send it as text, which is no jsonb without the cast.
ROW = f"({', '.join('CAST(%s AS jsonb)' if name == 'payload' else '%s' for name in COLUMNS)})"
INSERT = f"INSERT INTO public.outbox ({', '.join(COLUMNS)}) VALUES "  # noqa: S608
# In one statement; Postgres takes 65,535 parameters. As many as SQLAlchemy sends at once.
EVENTS_PER_STATEMENT = 1000


class Connection(Protocol):
    """The needed part of a DB-API connection; ``django.db.connection`` has it too."""

    def cursor(self) -> Any:
        """A new cursor."""


def append(connection: Connection, *events: Event) -> None:
    """Insert the events, in this order, in the connection's transaction. Never commits.

    Each event is checked first; if one is refused, none is written. Raises the same Failures as
    `outbox.writing.append.append`; `not-in-a-transaction` if the connection is in autocommit mode and no transaction is
    open, as in Django outside of ``transaction.atomic()``. Raises TypeError for an asyncio connection, which would
    insert nothing, and the driver's IntegrityError for a payload of more than a megabyte.
    """
    if any(inspect.iscoroutinefunction(getattr(connection, name, None)) for name in ("commit", "execute")):
        raise TypeError(f"append takes a DB-API connection, not {type(connection).__module__}'s for asyncio")
    if not events:
        return
    with closing(connection.cursor()) as cursor, appending(events) as found:
        # The driver's own connection, not Django's around it. Django opens it for the first cursor.
        require_transaction(getattr(cursor, "connection", connection))
        checked = rows(found)
        for first in range(0, len(checked), EVENTS_PER_STATEMENT):
            part = checked[first : first + EVENTS_PER_STATEMENT]
            cursor.execute(INSERT + ", ".join([ROW] * len(part)), [row[name] for row in part for name in COLUMNS])
