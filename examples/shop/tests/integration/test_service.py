"""A change: its rows, its events and the answer are written together, once, or not at all."""

from __future__ import annotations

import uuid

import pytest
from flask import Flask
from outbox import Settings
from outbox_lab.testing import all_at_once, outbox_records, query

from tests.conftest import TEA, Client

TRACEPARENT = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"
CUP = {"product": "CUP-7", "pieces": 1, "cents": 1200}


def stock(settings: Settings) -> dict[str, int]:
    """The pieces of each product."""
    return {str(product): pieces for product, pieces in query(settings, "SELECT product, pieces FROM stock")}


def written(settings: Settings) -> list[tuple[str, str, int]]:
    """Topic, type and version of each event in the outbox."""
    records = outbox_records(settings)
    return [(one["topic"], one["headers"]["eventType"], one["value"]["version"]) for one in records]


def test_an_order_changes_two_aggregates_and_writes_their_events(client: Client, databases: Settings) -> None:
    client.add("TEA-1", 5)
    client.add("CUP-7", 5)
    response = client.place(TEA, CUP, traceparent=TRACEPARENT)
    assert response.status_code == 201
    assert stock(databases) == {"TEA-1": 3, "CUP-7": 4}
    assert written(databases)[2:] == [
        ("shop.stock", "taken", 2),
        ("shop.stock", "taken", 2),
        ("shop.order", "placed", 1),
    ]
    *_, placed = outbox_records(databases)
    assert (placed["key"], placed["headers"]["schemaVersion"]) == (response.get_json()["id"], "2")
    assert placed["headers"]["traceparent"] == TRACEPARENT
    assert (placed["value"]["cents"], placed["value"]["pieces"]) == (2100, 3)


def test_a_cancelled_order_gives_its_pieces_back(client: Client, databases: Settings) -> None:
    client.add("TEA-1", 5)
    order = client.place().get_json()["id"]
    response = client.cancel(order)
    assert (response.status_code, response.get_json()["status"]) == (200, "cancelled")
    assert stock(databases) == {"TEA-1": 5}
    assert written(databases)[3:] == [("shop.stock", "added", 3), ("shop.order", "cancelled", 2)]


def test_a_sold_out_product_is_refused_and_nothing_is_written(client: Client, databases: Settings) -> None:
    client.add("TEA-1", 1)
    first, second = (client.place(key="a-key") for _ in range(2))
    assert (first.status_code, first.get_json()["type"]) == (409, "/problems/sold-out")
    client.add("TEA-1", 1)
    assert client.place(key="a-key").data == second.data == first.data, "the refusal is stored under its key"
    assert client.place().status_code == 201
    assert stock(databases) == {"TEA-1": 0}


@pytest.mark.parametrize("product", ["TEA-1", "TEA-2"])
def test_a_product_in_two_lines_is_counted_as_one(client: Client, databases: Settings, product: str) -> None:
    client.add("TEA-1", 3)
    assert client.place(TEA, {**TEA, "product": product}).status_code == 409
    assert stock(databases) == {"TEA-1": 3}


def test_a_repeated_request_is_applied_once(client: Client, databases: Settings) -> None:
    client.add("TEA-1", 5)
    first, second = (client.place(key="a-key") for _ in range(2))
    assert (first.status_code, first.data) == (second.status_code, second.data) == (201, first.data)
    assert stock(databases) == {"TEA-1": 3}
    assert len(outbox_records(databases)) == 3


def test_cancelling_twice_and_an_unknown_order_are_refused(client: Client) -> None:
    client.add("TEA-1", 5)
    order = client.place().get_json()["id"]
    answers = [client.cancel(one).status_code for one in (order, order, str(uuid.uuid4()))]
    assert answers == [200, 409, 404]


def test_an_order_is_read_where_its_location_says(client: Client) -> None:
    client.add("TEA-1", 5)
    placed = client.place()
    order = placed.get_json()
    assert placed.headers["Location"] == f"/orders/{order['id']}"
    assert client.get(placed.headers["Location"]).get_json() == order
    cancelled = client.cancel(order["id"]).get_json()
    assert client.get(f"/orders/{order['id']}").get_json() == cancelled != order


def test_an_unknown_order_is_not_found(client: Client) -> None:
    response = client.get(f"/orders/{uuid.uuid4()}")
    assert (response.status_code, response.get_json()["type"]) == (404, "/problems/unknown-order")


def test_a_cancellation_has_no_body(client: Client, databases: Settings) -> None:
    client.add("TEA-1", 5)
    path = f"/orders/{client.place().get_json()['id']}/cancel"
    assert client.post(path, {"reason": "late"}, Idempotency_Key="a-key").status_code == 422
    first, second = client.post(path, Idempotency_Key="a-key"), client.post(path, {}, Idempotency_Key="a-key")
    assert (first.status_code, first.data) == (second.status_code, second.data) == (200, first.data)
    assert stock(databases) == {"TEA-1": 5}


@pytest.mark.parametrize(
    "lines", [[], [{**TEA, "pieces": 0}], [{**TEA, "cents": 1.5}], [{**TEA, "color": "green"}], None]
)
def test_an_invalid_order_is_refused(client: Client, databases: Settings, lines: object) -> None:
    assert client.post("/orders", {"lines": lines}, Idempotency_Key="a-key").status_code == 422
    assert outbox_records(databases) == []


def test_the_last_pieces_are_sold_once(app: Flask, client: Client, databases: Settings) -> None:
    client.add("TEA-1", 6)
    answers = all_at_once(8, lambda _: Client(app, databases).place().status_code)
    assert sorted(answers) == [201] * 3 + [409] * 5
    assert stock(databases) == {"TEA-1": 0}
