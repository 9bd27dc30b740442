"""The public API for services that write events with asyncio: SQLAlchemy on asyncpg or psycopg 3."""

from outbox.writing.aio import append
from outbox.writing.event import Event

__all__ = ["Event", "append"]
