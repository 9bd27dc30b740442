"""Dead letters across deployments, and their replay beside a running sink. The attack tries all orders, on a model."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from outbox.base.database import connect, query
from outbox.base.settings import Settings, SinkRole
from outbox.events.catalog import Catalog
from outbox.sink.applying.postgres.applier import PostgresApplier
from outbox.sink.decoding.records import Record
from outbox.sink.repair import replay
from outbox.sink.repair.replay import Replayed, Selection
from outbox.sink.writer import Counts
from outbox_lab.testing.failures import raises
from tests.seen import ORDERED, Seen, create_tables
from tests.support.declared import TOML, Events, payload
from tests.support.declared_sinks import record

TOPIC = "shop.order"
PROPERTIES = {
    "quantity": {"type": "integer", "minimum": 1, "maximum": 99},
    "at": {"type": "string", "format": "date-time"},
    "price": {"type": "number"},
    "lines": {"type": "array"},
    "note": {"type": ["string", "null"]},
    "hint": {"type": "string"},
}
REQUIRED = ("quantity", "at", "price", "lines", "note")
PLACED = {
    "id": "a",
    "number": 1,
    "quantity": 2,
    "at": "2026-11-21T05:00:00.123456Z",
    "price": 0.1,
    "lines": [{"sku": "x", "price": 1.5}],
    "note": None,
}
AFTER = {"quantity": 2, "at": "2026-11-21T05:00:00.123456+00:00", "price": 0.1, "lines": PLACED["lines"], "note": None}
UPCAST = 'def placed_v1(payload):\n    return {**payload, "unit": "PCE"}\n'


class Shop:
    """The declared events, which grow."""

    def __init__(self, folder: Path) -> None:
        self.events = Events(folder)
        self.known = self.declare(placed_v1=payload(PROPERTIES, REQUIRED), cancelled_v1=payload())

    def declare(self, aggregate: str = "order", toml: str = TOML, **schemas: Any) -> Catalog:
        """Declare more events of an aggregate."""
        self.known = self.events.aggregate(aggregate, toml, **schemas).load()
        return self.known

    def declare_placed_v2(self, upcast: str = UPCAST) -> Catalog:
        """The second version of `placed`, which has a unit, with its upcaster."""
        self.events.write("order/upcast.py", upcast)
        return self.declare(placed_v2=payload(PROPERTIES | {"unit": {"type": "string"}}, (*REQUIRED, "unit")))


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path / "events")


@pytest.fixture
def seen(databases: Settings, tmp_path: Path, shop: Shop) -> Seen:
    """A sink of one event."""
    create_tables(databases)
    return Seen(databases, tmp_path, shop.known, ["order.placed"])


@pytest.fixture
def ordered(seen: Seen) -> Seen:
    """The sink, whose projection needs order."""
    return Seen(seen.settings, seen.folder, seen.known, seen.names, projection=ORDERED)


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

    def test_it_is_upcast_and_refused_again_its_record_stays_as_it_came(
        self, seen: Seen, shop: Shop, event: Record
    ) -> None:
        seen.deploy(known=shop.declare_placed_v2())
        seen.refuse(id_of(event))
        assert seen.replay() == Replayed(rejected=1)
        value = (event.value or b"").decode()
        assert seen.letters("is_event", "reason", "convert_from(value, 'UTF8')") == [(True, "unwelcome", value)]
        seen.refuse()
        assert seen.replay() == Replayed(applied=1)
        assert seen.events("unit", *AFTER) == [("PCE", *AFTER.values())]
        assert seen.apply_again(TOPIC, event) == Counts(rows=1, duplicates=1)

    @pytest.mark.usefixtures("event")
    def test_an_upcaster_that_fails_leaves_it_open(self, seen: Seen, shop: Shop) -> None:
        seen.deploy(known=shop.declare_placed_v2("def placed_v1(payload):\n    raise KeyError('x')\n"))
        assert seen.replay() == Replayed(rejected=1)
        assert seen.letters("status", "reason") == [("open", "upcast failed")]
        seen.deploy(known=shop.declare_placed_v2())
        assert seen.replay() == Replayed(applied=1)

    def test_values_come_back_as_they_were(self, seen: Seen) -> None:
        """A replay decodes the record: no value takes a way of its own."""
        extreme: dict[str, Any] = {"at": "9999-12-31T23:59:59Z", "price": 1e30, "hint": "x" * 2000}
        refused(seen, **extreme)
        assert seen.replay() == Replayed(applied=1)
        seen.apply(TOPIC, placed(**extreme))
        first, second = seen.events("at", "price", "hint")
        assert first == second


class TestOtherColumns:
    """The sink asks for more or fewer events, so its tables have other columns than the letter."""

    def test_columns_that_are_apart_since(self, seen: Seen, shop: Shop) -> None:
        refused(seen)
        seen.deploy("order", known=shop.declare(returned_v1=payload({"quantity": {"type": "number"}})))
        assert seen.replay() == Replayed(applied=1)
        assert seen.events("quantity:bigint", "quantity:numeric", "quantity") == [(2, None, None)]
        refused(seen, number=2)
        seen.deploy("order.placed")
        assert seen.replay() == Replayed(applied=1)
        assert seen.events("quantity")[1:] == [(2,)]

    def test_events_still_wait_for_it_where_order_is_asked_for(self, ordered: Seen, shop: Shop) -> None:
        """Also when the version has moved to a column of another name: the number of a receipt is a text."""
        first, second, third = (placed(number) for number in range(1, 4))
        ordered.refuse(id_of(first))
        ordered.apply(TOPIC, first)
        receipt = payload({"number": {"type": "string"}, "serial": payload()["properties"]["number"]}, ("serial",))
        known = shop.declare("receipt", 'key = "id"\nversion = "serial"\n', printed_v1=receipt)
        ordered.deploy("order.placed", "receipt", known=known)
        ordered.apply(TOPIC, second)
        ordered.deploy("order.placed")
        ordered.apply(TOPIC, third)
        assert ordered.letters("reason") == [("unwelcome",), ("parked",), ("parked",)]
        ordered.refuse()
        assert ordered.replay() == Replayed(applied=3)
        assert ordered.events("number") == [(1,), (2,), (3,)]


class TestReplayBesideASink:
    """A replay also replays the events that the running sink parks meanwhile, behind the letters."""

    @pytest.fixture
    def unread(self, ordered: Seen) -> Seen:
        """The sink has an unreadable event of the key a, and one behind it."""
        ordered.apply(TOPIC, placed(1, quantity="one"), placed(2))
        return ordered

    @staticmethod
    def run(seen: Seen, *meanwhile: Record) -> Replayed:
        """Replay the unreadable event with what is parked behind it. When they are chosen, the sink applies others."""
        with closing(connect(seen.settings, SinkRole.WRITER)) as connection:
            chosen = Selection(reason="schema violation").choose(connection, with_parked=True)
            seen.apply(TOPIC, *meanwhile)
            known = {seen.spec.name: seen.spec}
            (done,) = replay.replay(connection, known, chosen, applier_of=PostgresApplier).values()
            return done

    @staticmethod
    def correct(seen: Seen) -> None:
        """Make the event readable."""
        value = [placed().value]
        query(seen.settings, SinkRole.OWNER, "UPDATE dead_letters SET value = %s WHERE NOT is_event", value)

    @pytest.mark.parametrize("count", [1, 5])
    def test_what_is_parked_meanwhile_follows(self, unread: Seen, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
        monkeypatch.setattr(replay, "CHUNK_BYTES", 700)  # of some two letters
        self.correct(unread)
        more = [placed(3 + number) for number in range(count)]
        assert self.run(unread, *more, placed(1, id="b")) == Replayed(applied=2 + count)
        assert unread.events("id", "number") == [("b", 1), *(("a", 1 + number) for number in range(2 + count))]
        unread.apply(TOPIC, placed(3 + count))
        assert unread.events("number")[-1] == (3 + count,), "nothing blocks the key any more"

    def test_what_waits_for_a_letter_that_stays_open_stays(self, unread: Seen) -> None:
        assert self.run(unread, placed(3)) == Replayed(rejected=3), "each is tried once"
        assert unread.letters("reason") == [("schema violation",), ("parked",), ("parked",)]

    def test_what_is_parked_of_other_keys_stays(self, unread: Seen) -> None:
        self.correct(unread)
        assert self.run(unread, placed(1, id="b", quantity="one"), placed(2, id="b")) == Replayed(applied=2)
        assert unread.letters("status", "reason")[2:] == [("open", "schema violation"), ("open", "parked")]
