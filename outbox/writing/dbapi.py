"""`append` without SQLAlchemy: for Django, psycopg 3, psycopg2, and any DB-API 2 driver that writes ``%s``.

    with transaction.atomic():                  # Django; for psycopg 3: with psycopg.connect(...) as connection:
        order.save()                            # the change
        append(connection, Event("order", order_id, "order.placed", {"order_id": order_id}))

It needs the standard library alone. What `outbox.writing.append` says about events is true here too.
"""

from __future__ import annotations

import inspect
import json
from contextlib import closing
from dataclasses import fields
from typing import Any, Protocol

from outbox.writing.event import Event, require_transaction

__all__ = ["Event", "append"]

COLUMNS = tuple(field.name for field in fields(Event))
ROW = f"({', '.join(['%s'] * len(COLUMNS))})"
INSERT = f"INSERT INTO outbox ({', '.join(COLUMNS)}) VALUES "  # noqa: S608
# In one statement; Postgres takes 65,535 parameters. As many as SQLAlchemy sends at once.
EVENTS_PER_STATEMENT = 1000


class Connection(Protocol):
    """What is needed of a DB-API connection; ``django.db.connection`` has it too."""

    def cursor(self) -> Any:
        """A new cursor."""


def append(connection: Connection, *events: Event) -> None:
    """Insert the events, in this order, in the connection's transaction. Never commits.

    Raises Failure `not-in-a-transaction` if the connection is in autocommit mode and no transaction is open, as in
    Django outside of ``transaction.atomic()``; TypeError for an asyncio connection, which would insert nothing, and for
    a payload that is no JSON. Raises the driver's IntegrityError for a payload of more than a megabyte.
    """
    if inspect.iscoroutinefunction(getattr(connection, "commit", None)):
        raise TypeError(f"append takes a DB-API connection, not {type(connection).__module__}'s for asyncio")
    if not events:
        return
    with closing(connection.cursor()) as cursor:
        # The driver's own connection, not Django's around it. Django opens it for the first cursor.
        require_transaction(getattr(cursor, "connection", connection))
        for first in range(0, len(events), EVENTS_PER_STATEMENT):
            rows = [_row(event) for event in events[first : first + EVENTS_PER_STATEMENT]]
            cursor.execute(INSERT + ", ".join([ROW] * len(rows)), [value for row in rows for value in row])


def _row(event: Event) -> list[Any]:
    return [json.dumps(event.payload) if name == "payload" else getattr(event, name) for name in COLUMNS]
