"""The rules of orders, and their events. Nothing here reads or writes a database."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime
from typing import Annotated, Literal

from outbox import Event
from pydantic import BaseModel, ConfigDict, Field, StrictInt

from service import payloads

Product = Annotated[str, Field(pattern="^[A-Z0-9-]{1,20}$", examples=["TEA-1"])]


class UnknownOrder(Exception):
    """There is no such order."""


class AlreadyCancelled(Exception):
    """The order is cancelled."""


class Line(BaseModel):
    """Some pieces of one product."""

    model_config = ConfigDict(extra="forbid")

    product: Product
    pieces: Annotated[StrictInt, Field(ge=1, le=1000)]
    cents: Annotated[StrictInt, Field(ge=1, le=10_000_000, description="the price of one piece")]


class Order(BaseModel):
    """An order after its latest step."""

    id: uuid.UUID
    status: Literal["placed", "cancelled"]
    lines: list[Line]
    version: int = Field(description="how many steps it has taken")
    changed_at: datetime

    @property
    def cents(self) -> int:
        """The price of all lines."""
        return sum(line.pieces * line.cents for line in self.lines)

    @property
    def pieces(self) -> int:
        """The pieces of all lines."""
        return sum(line.pieces for line in self.lines)


def place(lines: list[Line]) -> Order:
    """A new order."""
    return Order(id=uuid.uuid4(), status="placed", lines=lines, version=1, changed_at=datetime.now(UTC))


def cancel(before: Order) -> Order:
    """The order after it is cancelled. Raises AlreadyCancelled."""
    if before.status == "cancelled":
        raise AlreadyCancelled(f"order {before.id} is cancelled already")
    return before.model_copy(
        update={"status": "cancelled", "version": before.version + 1, "changed_at": datetime.now(UTC)}
    )


def event(order: Order) -> Event:
    """The event of the order's latest step, typed by connect/events/order."""
    lines = [payloads.Line(product=line.product, pieces=line.pieces, cents=line.cents) for line in order.lines]
    if order.status == "cancelled":
        return Event.of(
            payloads.OrderCancelledV1(
                order_id=order.id,
                cents=-order.cents,
                lines=lines,
                version=order.version,
                occurred_at=order.changed_at,
            )
        )
    return Event.of(
        payloads.OrderPlacedV2(
            order_id=order.id,
            cents=order.cents,
            pieces=order.pieces,
            lines=lines,
            version=order.version,
            occurred_at=order.changed_at,
        )
    )
