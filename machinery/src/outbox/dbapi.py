"""The public API for services without SQLAlchemy: Django, psycopg 3, psycopg2, other DB-API drivers."""

from outbox.writing.dbapi import append
from outbox.writing.event import Event

__all__ = ["Event", "append"]
