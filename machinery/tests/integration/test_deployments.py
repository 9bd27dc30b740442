"""Values of dead letters across deployments. The attack tries all orders of deployments, on a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outbox.base.settings import Settings
from outbox.events.catalog import Catalog
from outbox.sink.decoding.records import Record
from outbox.sink.repair.replay import Replayed
from outbox.sink.writer import Counts
from outbox_lab.testing.failures import raises
from tests.seen import ORDERED, Seen, create_tables
from tests.support.declared import TOML, Events, payload
from tests.support.declared_sinks import record

TOPIC = "shop.order"
QUANTITY = {"quantity": {"type": "integer", "minimum": 1, "maximum": 99}}
MORE = {
    "at": {"type": "string", "format": "date-time"},
    "price": {"type": "number"},
    "lines": {"type": "array"},
    "note": {"type": ["string", "null"]},
    "hint": {"type": "string"},
}
UNIT = {"unit": {"type": "string"}}
PLACED = {
    "id": "a",
    "number": 1,
    "quantity": 2,
    "at": "2026-11-21T05:00:00.123456Z",
    "price": 0.1,
    "lines": [{"sku": "x", "price": 1.5}],
    "note": None,
}
REQUIRED = ("quantity", "at", "price", "lines", "note")
UPCAST = 'def placed_v1(payload):\n    return {**payload, "unit": "PCE"}\n'
AFTER = {"quantity": 2, "at": "2026-11-21T05:00:00.123456+00:00", "price": 0.1, "lines": PLACED["lines"], "note": None}


class Shop:
    """The declared events, which grow."""

    def __init__(self, folder: Path) -> None:
        self._events = Events(folder)
        self._events.aggregate("order", TOML, placed_v1=payload(QUANTITY | MORE, REQUIRED), cancelled_v1=payload())
        self._events.aggregate("invoice", TOML, sent_v1=payload())

    def declare(self, **schemas: Any) -> Catalog:
        """Declare more events of orders; the second version of `placed` with its upcaster."""
        self._events.aggregate("order", TOML, **schemas)
        if "placed_v2" in schemas:
            self._events.write("order/upcast.py", UPCAST)
        return self.known

    def declare_placed_v2(self) -> Catalog:
        """The second version of `placed`, which has a unit."""
        return self.declare(placed_v2=payload(QUANTITY | MORE | UNIT, (*REQUIRED, "unit")))

    def declare_receipts(self) -> Catalog:
        """Receipts have a number too, which is a text and no version."""
        properties = payload()["properties"]
        receipt = payload({"number": {"type": "string"}, "serial": properties["number"]}, ("serial",))
        self._events.aggregate("receipt", 'key = "id"\nversion = "serial"\n', printed_v1=receipt)
        return self.known

    @property
    def known(self) -> Catalog:
        return self._events.load()


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path / "events")


@pytest.fixture
def seen(databases: Settings, tmp_path: Path, shop: Shop) -> Seen:
    """A sink of one event."""
    create_tables(databases)
    return Seen(databases, tmp_path, shop.known, ["order.placed"])


def placed(number: int = 1, **changes: Any) -> Record:
    return record("placed", PLACED | {"number": number} | changes)


def refused(seen: Seen, **changes: Any) -> Record:
    """An event that the projection has refused, and would apply now."""
    event = placed(**changes)
    seen.refuse(id_of(event))
    assert seen.apply(TOPIC, event) == Counts(rows=1, rejected=1)
    seen.refuse()
    return event


def id_of(one: Record) -> str:
    return (dict(one.headers)["id"] or b"").decode()


class TestUndeclared:
    """The service was deployed first."""

    def test_a_version_of_the_future_is_applied_once_it_is_declared(self, seen: Seen, shop: Shop) -> None:
        later = record("placed", PLACED | {"unit": "KGM"}, 2)
        assert seen.apply(TOPIC, placed(id="b"), later) == Counts(rows=1, applied=1, dead=1)
        assert seen.letters("reason", "is_event") == [("unknown schema version", False)]
        assert seen.replay() == Replayed(rejected=1), "it is not declared yet"
        seen.deploy(known=shop.declare_placed_v2())
        assert seen.replay() == Replayed(applied=1)
        assert seen.events("id", "unit") == [("b", None), ("a", "KGM")]
        assert seen.apply_again(TOPIC, later, start=1) == Counts(rows=1, duplicates=1)


def test_a_deprecated_event_is_applied(seen: Seen, shop: Shop) -> None:
    seen.deploy("order", known=shop.declare(paid_v1=payload(deprecated=True)))
    assert seen.apply(TOPIC, record("paid", {"id": "a", "number": 1})) == Counts(rows=1, applied=1)


class TestStart:
    """A driver that starts, and one that does not."""

    def test_a_refused_start_stores_nothing_of_its_job(self, seen: Seen, shop: Shop) -> None:
        seen.apply(TOPIC, placed())
        seen.deploy("order.placed", "order.paid", known=shop.declare(paid_v1=payload()), is_decided=False)
        with seen.running() as writer, raises("topic-recreated"):
            writer.positions(TOPIC, "another id")
        seen.deploy("order.placed", is_decided=False)
        assert seen.apply(TOPIC, placed(2, id="b")) == Counts(rows=1, applied=1)


class TestOlderVersions:
    """The letter is of a valid event, in an older version."""

    @pytest.fixture(params=["one type", "several types"])
    def event(self, seen: Seen, request: pytest.FixtureRequest) -> Record:
        """An event that the projection has refused under version 1."""
        if request.param == "several types":
            seen.deploy("order")
        event = refused(seen)
        assert seen.letters("is_event", "version") == [(True, 1)]
        return event

    def test_it_is_upcast(self, seen: Seen, shop: Shop, event: Record) -> None:
        seen.deploy(known=shop.declare_placed_v2())
        assert seen.replay() == Replayed(applied=1)
        (applied,) = seen.events("unit", *AFTER)
        assert applied == ("PCE", *AFTER.values())
        assert seen.apply_again(TOPIC, event) == Counts(rows=1, duplicates=1)

    def test_refused_again_its_record_stays_as_it_came(self, seen: Seen, shop: Shop, event: Record) -> None:
        seen.deploy(known=shop.declare_placed_v2())
        seen.refuse(id_of(event))
        assert seen.replay() == Replayed(rejected=1)
        value = (event.value or b"").decode()
        assert seen.letters("is_event", "reason", "convert_from(value, 'UTF8')") == [(True, "unwelcome", value)]
        seen.refuse()
        assert seen.replay() == Replayed(applied=1)

    @pytest.mark.usefixtures("event")
    def test_an_upcaster_that_fails_leaves_it_open(self, seen: Seen, shop: Shop) -> None:
        known = shop.declare_placed_v2()
        (known.folder / "order" / "upcast.py").write_text("def placed_v1(payload):\n    raise KeyError('x')\n")
        seen.deploy(known=shop.known)
        assert seen.replay() == Replayed(rejected=1)
        assert seen.letters("status", "reason") == [("open", "upcast failed")]
        shop.declare_placed_v2()
        seen.deploy(known=shop.known)
        assert seen.replay() == Replayed(applied=1)

    def test_values_come_back_as_they_were(self, seen: Seen) -> None:
        """A replay decodes the record: no value takes a way of its own."""
        extreme: dict[str, Any] = {"at": "9999-12-31T23:59:59Z", "price": 1e30, "hint": "x" * 2000}
        refused(seen, **extreme)
        assert seen.replay() == Replayed(applied=1)
        other = record(
            "placed", PLACED | {"at": "9999-12-31T23:59:59Z", "price": float(f"{10**30}"), "hint": "x" * 2000}
        )
        seen.apply(TOPIC, other)
        first, second = seen.events("at", "price", "hint")
        assert first == second


class TestOtherColumns:
    """The sink asks for more or fewer events, so its tables have other columns than the letter."""

    def test_columns_that_are_apart_since(self, seen: Seen, shop: Shop) -> None:
        refused(seen)
        known = shop.declare(returned_v1=payload({"quantity": {"type": "number"}}))
        seen.deploy("order", known=known)
        assert seen.replay() == Replayed(applied=1)
        assert seen.events("quantity:bigint", "quantity:numeric", "quantity") == [(2, None, None)]
        refused(seen, number=2)
        seen.deploy("order.placed")
        assert seen.replay() == Replayed(applied=1)
        assert seen.events("quantity")[1:] == [(2,)]

    def test_events_still_wait_for_it_where_order_is_asked_for(
        self, databases: Settings, tmp_path: Path, shop: Shop, seen: Seen
    ) -> None:
        """Also when the version has moved to a column of another name."""
        del seen
        ordered = Seen(databases, tmp_path, shop.known, ["order.placed"], projection=ORDERED)
        first, second, third = (placed(number) for number in range(1, 4))
        ordered.refuse(id_of(first))
        ordered.apply(TOPIC, first)
        ordered.deploy("order.placed", "receipt", known=shop.declare_receipts())
        ordered.apply(TOPIC, second)
        assert ordered.letters("reason") == [("unwelcome",), ("parked",)]
        ordered.deploy("order.placed")
        ordered.apply(TOPIC, third)
        assert ordered.letters("reason") == [("unwelcome",), ("parked",), ("parked",)]
        ordered.refuse()
        assert ordered.replay() == Replayed(applied=3)
        assert ordered.events("number") == [(1,), (2,), (3,)]
