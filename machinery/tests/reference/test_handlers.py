"""Example of docs/reference.md: a handler."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from outbox import Settings
from outbox.base.database import connect
from outbox.base.settings import SinkRole
from outbox.handlers import AsyncConnection, Event, handler

if TYPE_CHECKING:
    from psycopg2.extensions import connection


@handler("order.placed", attempts=3)
def reserve(event: Event, connection: connection) -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO reservations (order_id, quantity) VALUES (%s, %s)", [event.key, event.payload["quantity"]]
        )


@handler("order.placed", workers=20, begin="latest")
async def notify(event: Event, connection: AsyncConnection) -> None:
    await connection.execute("INSERT INTO notices (order_id) VALUES (%s)", [event.key])


def test_a_handler_is_an_ordinary_function(databases: Settings) -> None:
    placed = Event("01a1fc75-167d-7239-af57-d1ee1a62e0a6", "order.placed", "order-1", 1, {"quantity": 2})
    with closing(connect(databases, SinkRole.OWNER)) as connection, connection.cursor() as cursor:
        cursor.execute("CREATE TABLE reservations (order_id text, quantity int)")
        reserve(placed, connection)
        cursor.execute("SELECT * FROM reservations")
        assert cursor.fetchall() == [("order-1", 2)]
    assert (notify.is_async, notify.workers, notify.begin) == (True, 20, "latest")
    assert (reserve.name, reserve.events, reserve.attempts) == ("reserve", ("order.placed",), 3)
