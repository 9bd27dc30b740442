"""The statement of each account: a numbered line for each event of its balance. `outbox handle` writes them.

Optional: to do without, delete this file, `handlers` in pyproject.toml, and what demo/soak.py says of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox.handlers import Event, handler

if TYPE_CHECKING:
    from psycopg2 import extensions

# The events of an account come in their order, one after the other: so the next number is free.
LINE = """
INSERT INTO statement_lines (account_id, line, event_id, transfer_id, balance_minor)
SELECT %(account_id)s, coalesce(max(line), 0) + 1, %(event_id)s, %(transfer_id)s, %(balance_after)s
  FROM statement_lines WHERE account_id = %(account_id)s
"""


@handler("balance")
def statements(event: Event, connection: extensions.connection) -> None:
    """Write a line of the account's statement."""
    with connection.cursor() as cursor:
        cursor.execute(LINE, {**event.payload, "event_id": event.id})
