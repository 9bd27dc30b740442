"""The public API for services that write events with asyncio: SQLAlchemy on asyncpg or psycopg 3.

    async with AsyncSession(engine) as session, session.begin():
        session.add(order)                                                                    # the change
        await append(session, Event("order", order_id, "placed", {"order_id": order_id}))    # and its event

What `outbox.writing.append` says about events is true here too.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session

from outbox.writing.append import append as append_blocking
from outbox.writing.event import Event

__all__ = ["Event", "append"]


async def append(target: AsyncConnection | AsyncSession | async_scoped_session[Any], *events: Event) -> None:
    """Insert the events, in this order, in the transaction of a connection or of an ORM session. Never commits.

    Raises the same Failures as `outbox.writing.append.append`, and TypeError for anything else than an asyncio
    connection or session of SQLAlchemy.
    """
    one = target() if isinstance(target, async_scoped_session) else target
    if not isinstance(one, AsyncConnection | AsyncSession):
        raise TypeError(f"append takes an AsyncConnection or an AsyncSession, not {type(target).__name__}")
    await one.run_sync(append_blocking, *events)
