"""The comparisons: a state that is wrong in any way is found, and set to the source's. Without Kafka and Spark."""

from __future__ import annotations

import pytest
from outbox import Settings
from outbox_lab.testing import SinkRole, deliver, differing_keys, outbox_records, query, rebuild

from tests.conftest import Client

PLACED = {"status": "placed", "cents": 900, "pieces": 2, "version": 1}


@pytest.fixture
def order(client: Client, databases: Settings) -> str:
    """An order that was placed, beside a cancelled one; all sinks have their events."""
    client.add("TEA-1", 5)
    order, other = (str(client.place().get_json()["id"]) for _ in range(2))
    client.cancel(other)
    for sink in ("orders", "stock"):
        deliver(databases, outbox_records(databases), sink)
    return order


@pytest.mark.usefixtures("order")
def test_both_sides_are_equal(databases: Settings) -> None:
    assert differing_keys(databases, "orders") == {"order_states": set(), "value": set()}
    assert differing_keys(databases, "stock") == {"stock_levels": set(), "pieces": set()}


@pytest.mark.parametrize(
    ("change", "column", "values"),
    [
        ("UPDATE order_states SET status = 'cancelled'", "status", ("cancelled", "placed")),
        ("UPDATE order_states SET pieces = 1", "pieces", (1, 2)),
        ("DELETE FROM order_states", "status", (None, "placed")),
    ],
)
def test_a_wrong_order_is_found_and_set(
    databases: Settings, order: str, change: str, column: str, values: tuple[object, object]
) -> None:
    query(databases, f"{change} WHERE order_id = '{order}'", SinkRole.OWNER)
    assert differing_keys(databases, "orders")["order_states"] == {order}
    assert rebuild(databases, "orders")[order][column] == values
    assert differing_keys(databases, "orders") == {"order_states": set(), "value": set()}
    assert rebuild(databases, "orders") == {}


def test_an_order_that_the_source_does_not_have_is_deleted(databases: Settings, order: str) -> None:
    query(databases, f"UPDATE order_states SET order_id = gen_random_uuid() WHERE order_id = '{order}'", SinkRole.OWNER)
    found = rebuild(databases, "orders")
    assert found.pop(order) == {name: (None, value) for name, value in PLACED.items()}
    assert list(found.values()) == [{name: (value, None) for name, value in PLACED.items()}]
    assert query(databases, "SELECT count(*) FROM order_states", SinkRole.OWNER) == [(2,)]


@pytest.mark.usefixtures("order")
def test_a_wrong_stock_is_found_and_set(databases: Settings) -> None:
    query(databases, "UPDATE stock_levels SET pieces = 9, version = 9", SinkRole.OWNER)
    assert differing_keys(databases, "stock") == {"stock_levels": {"TEA-1"}, "pieces": {"TEA-1"}}
    assert rebuild(databases, "stock") == {"TEA-1": {"pieces": (9, 3), "version": (9, 4)}}
