"""The public API for handlers: functions that react to events, each event once in effect (docs/handlers.md)."""

from outbox.sink.applying.handlers.aio import AsyncConnection
from outbox.sink.applying.handlers.handler import Event, handler

__all__ = ["AsyncConnection", "Event", "handler"]
