"""Garages: their rows, by SQLAlchemy's ORM, and their rules, which know neither HTTP nor a database."""

from __future__ import annotations

from typing import NamedTuple

from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

CAPACITY = 3


class Base(DeclarativeBase):
    """The tables."""


class Garage(Base):
    """A garage."""

    __tablename__ = "garages"

    id: Mapped[str] = mapped_column(primary_key=True)
    cars: Mapped[int]
    version: Mapped[int]


class After(NamedTuple):
    """A garage after an event."""

    cars: int
    version: int


class Full(Exception):
    """No place is free."""


class Empty(Exception):
    """No car is inside."""


def enter(garage: Garage) -> After:
    """A car enters. Raises Full."""
    if garage.cars == CAPACITY:
        raise Full(f"garage {garage.id} is full")
    return After(garage.cars + 1, garage.version + 1)


def leave(garage: Garage) -> After:
    """A car leaves. Raises Empty."""
    if garage.cars == 0:
        raise Empty(f"garage {garage.id} is empty")
    return After(garage.cars - 1, garage.version + 1)


async def locked(session: AsyncSession, garage: str) -> Garage:
    """The garage, locked until the end of the transaction; made if it is new."""
    await session.execute(insert(Garage).values(id=garage, cars=0, version=0).on_conflict_do_nothing())
    return await session.get_one(Garage, garage, with_for_update={"key_share": True})
