"""One transaction of a service, in every way that a service may have: a change of its own, and events beside it."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from functools import partial
from typing import Any, NamedTuple

import django
import psycopg
import psycopg2
from django.conf import settings as django_settings
from sqlalchemy import URL, Connection, create_engine, text
from sqlalchemy.ext.asyncio import (
    AsyncConnection,
    AsyncEngine,
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, scoped_session, sessionmaker
from sqlalchemy.pool import NullPool

from outbox import aio, dbapi
from outbox.base.settings import Settings, SourceRole
from outbox.writing import append

INSERT = "INSERT INTO items (id, unit, stock, version) VALUES (%s, 'KGM', 0, 0)"


class Transaction(NamedTuple):
    """An open transaction of the role that may only INSERT into the outbox. The end of the block commits it."""

    change: Callable[[uuid.UUID], object]  # insert an item
    append: Callable[..., object]


Way = Callable[[Settings], AbstractContextManager[Transaction]]


class Base(DeclarativeBase):
    """The ORM's tables."""


class Item(Base):
    """An item, as SQLAlchemy's ORM maps it."""

    __tablename__ = "items"
    id: Mapped[uuid.UUID] = mapped_column(primary_key=True)
    unit: Mapped[str]
    stock: Mapped[int]
    version: Mapped[int]


def new_item(item_id: uuid.UUID) -> Item:
    """An item to add to a session."""
    return Item(id=item_id, unit="KGM", stock=0, version=0)


def url(driver: str, settings: Settings) -> URL:
    """The database as the service's role, for an engine of SQLAlchemy."""
    dsn = {name: str(value) for name, value in settings.dsn(SourceRole.APP).items()}
    return URL.create(
        f"postgresql+{driver}", dsn["user"], dsn["password"], dsn["host"], int(dsn["port"]), dsn["dbname"]
    )


@contextmanager
def core(driver: str, settings: Settings) -> Iterator[Transaction]:
    """A connection of SQLAlchemy Core."""
    with create_engine(url(driver, settings), poolclass=NullPool).begin() as connection:
        yield Transaction(partial(_insert, connection), partial(append.append, connection))


def _insert(connection: Connection, item_id: uuid.UUID) -> None:
    connection.execute(text(INSERT.replace("%s", ":id")), {"id": item_id})


@contextmanager
def session(settings: Settings, *, is_scoped: bool = False) -> Iterator[Transaction]:
    """A session of SQLAlchemy's ORM; a scoped_session is what Flask-SQLAlchemy calls ``db.session``."""
    engine = create_engine(url("psycopg2", settings), poolclass=NullPool)
    made = scoped_session(sessionmaker(engine)) if is_scoped else Session(engine)
    try:
        yield Transaction(lambda item_id: made.add(new_item(item_id)), partial(append.append, made))
        made.commit()
    finally:
        made.close()


@contextmanager
def in_asyncio(
    driver: str, opened: Callable[[AsyncEngine], Any], settings: Settings, *, is_sync: bool = False
) -> Iterator[Transaction]:
    """A connection or a session for asyncio, with `aio.append`; or with `append` itself, run by the connection."""
    with asyncio.Runner() as runner:
        made = runner.run(_made(opened, create_async_engine(url(driver, settings), poolclass=NullPool)))

        def change(item_id: uuid.UUID) -> None:
            if isinstance(made, AsyncConnection):
                runner.run(made.run_sync(_insert, item_id))
            else:
                made.add(new_item(item_id))

        def send(*events: Any) -> None:
            runner.run(made.run_sync(append.append, *events) if is_sync else aio.append(made, *events))

        try:
            yield Transaction(change, send)
            runner.run(made.commit())
        finally:
            runner.run(made.close())


async def _made(opened: Callable[[AsyncEngine], Any], engine: AsyncEngine) -> Any:
    """A session, or a connection, which is one once it is awaited."""
    made = opened(engine)
    return await made if isinstance(made, AsyncConnection) else made


def session_of_a_task(engine: AsyncEngine) -> async_scoped_session[AsyncSession]:
    """An async_scoped_session."""
    return async_scoped_session(async_sessionmaker(engine), scopefunc=lambda: 1)


@contextmanager
def dbapi_connection(driver: Any, settings: Settings) -> Iterator[Transaction]:
    """A connection of a driver."""
    # Either driver commits at the end of the block, and rolls back after an exception.
    with closing(driver.connect(**settings.dsn(SourceRole.APP))) as connection, connection:
        yield Transaction(
            lambda item_id: connection.cursor().execute(INSERT, [str(item_id)]),
            partial(dbapi.append, connection),
        )


@contextmanager
def django_atomic(settings: Settings) -> Iterator[Transaction]:
    """``transaction.atomic()`` of Django."""
    from django.db import transaction

    with django_connection(settings) as connection, transaction.atomic():
        yield Transaction(
            lambda item_id: connection.cursor().execute(INSERT, [str(item_id)]),
            partial(dbapi.append, connection),
        )


@contextmanager
def django_connection(settings: Settings) -> Iterator[Any]:
    """``django.db.connection`` to the database of the test, in Django's autocommit mode."""
    if not django_settings.configured:
        django_settings.configure()
        django.setup()
    from django.db import connection, connections

    dsn = {name.upper(): value for name, value in settings.dsn(SourceRole.APP).items()}
    default = {"ENGINE": "django.db.backends.postgresql", "NAME": dsn["DBNAME"], **dsn}
    connections.settings = connections.configure_settings({"default": default})
    try:
        yield connection
    finally:
        connection.close()
        del connections["default"]


WAYS: dict[str, Way] = {
    "core, psycopg2": partial(core, "psycopg2"),
    "core, psycopg 3": partial(core, "psycopg"),
    "session": session,
    "scoped session": partial(session, is_scoped=True),
    "asyncio connection, asyncpg": partial(in_asyncio, "asyncpg", AsyncEngine.connect),
    "asyncio connection, psycopg 3": partial(in_asyncio, "psycopg", AsyncEngine.connect),
    "asyncio session, asyncpg": partial(in_asyncio, "asyncpg", AsyncSession),
    "asyncio scoped session, asyncpg": partial(in_asyncio, "asyncpg", session_of_a_task),
    "asyncio, run_sync": partial(in_asyncio, "psycopg", AsyncEngine.connect, is_sync=True),
    "psycopg2": partial(dbapi_connection, psycopg2),
    "psycopg 3": partial(dbapi_connection, psycopg),
    "django": django_atomic,
}
