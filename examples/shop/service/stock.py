"""The rules of the stock, and its events. Nothing here reads or writes a database."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Literal, NamedTuple

from outbox import Event
from pydantic import BaseModel

from service.payloads import StockAddedV1, StockTakenV1


class SoldOut(Exception):
    """There are not enough pieces of a product."""


class Stock(BaseModel):
    """The pieces of a product that are on the shelf."""

    product: str
    pieces: int
    version: int


class Movement(NamedTuple):
    """Pieces of a product that come or go, and the stock after that."""

    type: Literal["added", "taken"]
    pieces: int
    after: Stock


def add(before: Stock, pieces: int) -> Movement:
    """Put pieces on the shelf."""
    return Movement("added", pieces, _after(before, pieces))


def take(before: Stock, pieces: int) -> Movement:
    """Take pieces from the shelf. Raises SoldOut."""
    if pieces > before.pieces:
        raise SoldOut(f"there are {before.pieces} pieces of {before.product}, and {pieces} are wanted")
    return Movement("taken", pieces, _after(before, -pieces))


def event(movement: Movement) -> Event:
    """The event of a movement, typed by connect/events/stock."""
    payload = StockAddedV1 if movement.type == "added" else StockTakenV1
    return Event.of(
        payload(
            product=movement.after.product,
            pieces=movement.pieces,
            version=movement.after.version,
            occurred_at=datetime.now(UTC),
        )
    )


def _after(before: Stock, pieces: int) -> Stock:
    return Stock(product=before.product, pieces=before.pieces + pieces, version=before.version + 1)
