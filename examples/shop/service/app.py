"""The service: fill the shelf; place, cancel and read orders. A change writes rows, events and answer, or nothing."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Iterable, Sequence
from http import HTTPStatus
from typing import Annotated

from flask import Flask, Response
from flask_openapi3.blueprint import APIBlueprint
from outbox import Settings
from outbox.web import READING, SECURITY, WRITING, Change, Kind, Service, WriteHeaders, responses
from pydantic import BaseModel, ConfigDict, Field, StrictInt
from sqlalchemy import Connection, TextClause, text

from service import orders, stock
from service.orders import AlreadyCancelled, Line, Order, Product, UnknownOrder
from service.stock import Movement, SoldOut, Stock

INSERT = text("""
    INSERT INTO orders (id, status, cents, version, changed_at) VALUES (:id, :status, :cents, :version, :changed_at)
""")
INSERT_LINE = text("""
    INSERT INTO order_lines (order_id, number, product, pieces, cents)
    VALUES (:order_id, :number, :product, :pieces, :cents)
""")
READ = text("SELECT id, status, version, changed_at FROM orders WHERE id = :id")
LOCK = text(f"{READ} FOR NO KEY UPDATE")
LINES = text("SELECT product, pieces, cents FROM order_lines WHERE order_id = :id ORDER BY number")
UPDATE = text("UPDATE orders SET status = :status, version = :version, changed_at = :changed_at WHERE id = :id")
ADD_PRODUCT = text("INSERT INTO stock (product, pieces, version) VALUES (:product, 0, 0) ON CONFLICT DO NOTHING")
# In one order for all requests: no deadlocks.
LOCK_STOCK = text("""
    SELECT product, pieces, version FROM stock WHERE product = ANY(:products) ORDER BY product FOR NO KEY UPDATE
""")
UPDATE_STOCK = text("UPDATE stock SET pieces = :pieces, version = :version WHERE product = :product")

# The problem that each refusal becomes.
REFUSALS: dict[type[Exception], Kind] = {
    SoldOut: Kind(HTTPStatus.CONFLICT, "/problems/sold-out", "Sold out"),
    AlreadyCancelled: Kind(HTTPStatus.CONFLICT, "/problems/already-cancelled", "Already cancelled"),
    UnknownOrder: Kind(HTTPStatus.NOT_FOUND, "/problems/unknown-order", "Unknown order"),
}


class NewPieces(BaseModel):
    """Pieces to put on the shelf."""

    model_config = ConfigDict(extra="forbid")

    product: Product
    pieces: Annotated[StrictInt, Field(ge=1, le=1_000_000)]


class NewOrder(BaseModel):
    """An order to place."""

    model_config = ConfigDict(extra="forbid")

    lines: Annotated[list[Line], Field(min_length=1, max_length=100)]


class OrderPath(BaseModel):
    """The order in the path."""

    order_id: uuid.UUID


def create_app(settings: Settings | None = None) -> Flask:
    """The WSGI application. Raises Failure if the settings have no token."""
    service = Service("Shop", settings, REFUSALS)
    return service.app(shop_api(service))


def shop_api(service: Service) -> APIBlueprint:
    """The routes of the service."""
    api = APIBlueprint("shop", __name__, abp_security=SECURITY)
    refusing = {**WRITING, **responses(HTTPStatus.CONFLICT)}

    @api.post("/stock", responses={HTTPStatus.CREATED: Stock, **WRITING})
    def add_pieces(header: WriteHeaders, body: NewPieces) -> Response:
        """Put pieces of a product on the shelf."""
        return service.answer(header, body, add).response()

    @api.post("/orders", responses={HTTPStatus.CREATED: Order, **refusing})
    def place_order(header: WriteHeaders, body: NewOrder) -> Response:
        """Place an order, unless a product is sold out."""
        return service.answer(header, body, place).response("/orders")

    @api.post(
        "/orders/<uuid:order_id>/cancel",
        responses={HTTPStatus.OK: Order, **refusing, **responses(HTTPStatus.NOT_FOUND)},
    )
    def cancel_order(header: WriteHeaders, path: OrderPath) -> Response:
        """Cancel an order. Its pieces go back to the shelf."""
        return service.answer(header, path.order_id, cancel).response()

    @api.get("/orders/<uuid:order_id>", responses={HTTPStatus.OK: Order, **READING})
    def read_order(path: OrderPath) -> Response:
        """An order as it is now."""
        with service.engine.connect() as connection:
            order = _order(connection, READ, path.order_id)
        return Response(order.model_dump_json(), mimetype="application/json")

    return api


def add(change: Change, wanted: NewPieces) -> None:
    """Put the pieces on the shelf."""
    change.connection.execute(ADD_PRODUCT, {"product": wanted.product})
    (before,) = _lock_stock(change.connection, [wanted.product])
    movement = stock.add(before, wanted.pieces)
    if change.claim(movement.after):
        _move(change, [movement])


def place(change: Change, wanted: NewOrder) -> None:
    """Place the order: its rows, the events and the answer. Raises SoldOut."""
    order = orders.place(wanted.lines)
    pieces = _pieces(order)
    taken = [stock.take(before, pieces[before.product]) for before in _lock_stock(change.connection, pieces)]
    if change.claim(order):
        change.connection.execute(INSERT, {**order.model_dump(), "cents": order.cents})
        lines = [{"order_id": order.id, "number": n, **line.model_dump()} for n, line in enumerate(order.lines, 1)]
        change.connection.execute(INSERT_LINE, lines)
        _move(change, taken)
        change.append(orders.event(order))


def cancel(change: Change, order_id: uuid.UUID) -> None:
    """Cancel the order. Raises UnknownOrder or AlreadyCancelled."""
    after = orders.cancel(_order(change.connection, LOCK, order_id))
    pieces = _pieces(after)
    given_back = [stock.add(before, pieces[before.product]) for before in _lock_stock(change.connection, pieces)]
    if change.claim(after, HTTPStatus.OK):
        change.connection.execute(UPDATE, after.model_dump())
        _move(change, given_back)
        change.append(orders.event(after))


def _pieces(order: Order) -> Counter[str]:
    """By product how many pieces an order has."""
    pieces = Counter[str]()
    for line in order.lines:
        pieces[line.product] += line.pieces
    return pieces


def _move(change: Change, movements: Sequence[Movement]) -> None:
    """Write the stock after these movements, and their events."""
    change.connection.execute(UPDATE_STOCK, [movement.after.model_dump() for movement in movements])
    change.append(*map(stock.event, movements))


def _order(connection: Connection, statement: TextClause, order_id: uuid.UUID) -> Order:
    """The order by READ, or by LOCK until the end of the transaction. Raises UnknownOrder."""
    row = connection.execute(statement, {"id": order_id}).mappings().one_or_none()
    if row is None:
        raise UnknownOrder(f"order {order_id} does not exist")
    return Order(**row, lines=[Line(**line) for line in connection.execute(LINES, {"id": order_id}).mappings()])


def _lock_stock(connection: Connection, products: Iterable[str]) -> list[Stock]:
    """The stock of products, locked until the end of the transaction. An unknown product has no stock."""
    names = sorted(products)
    found = {row["product"]: Stock(**row) for row in connection.execute(LOCK_STOCK, {"products": names}).mappings()}
    return [found.get(name) or Stock(product=name, pieces=0, version=0) for name in names]
