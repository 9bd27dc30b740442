"""Which records of a topic a sink decodes: exactly the events that it asks for, in the newest version."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox.events.catalog import Catalog
from outbox.events.schema import Column
from outbox.sink.decoding.decoder import DecodedEvent, RecordDecoder
from outbox.sink.decoding.records import Record
from outbox.sink.decoding.values import rows_of
from tests.support.declared import TOML, Events, payload
from tests.support.declared_sinks import decoder, record
from tests.support.made_events import as_read
from tests.unit.test_records import both_ways

QUANTITY = {"quantity": {"type": "integer", "minimum": 1, "maximum": 99}}
UNIT = {"unit": {"type": "string", "maxLength": 3}}
UPCAST = """
def placed_v1(payload):
    if payload["quantity"] == 13:
        raise ValueError("unlucky")
    changes = {66: {"unit": 6}, 77: {"id": "other"}, 88: {"number": payload["number"] + 1}}
    return {**payload, "unit": "PCE", **changes.get(payload["quantity"], {})}


def placed_v2(payload):
    return {**payload, "is_gift": payload["unit"] == "PCE"}
"""
SHARED = f'{TOML}topic = "shop.all"\n'
PLACED = {"id": "a", "number": 1, "quantity": 2}
PLACED_2 = PLACED | {"unit": "KGM"}
PLACED_3 = PLACED_2 | {"is_gift": True}
PLAIN = {"id": "a", "number": 2}
UPPER_CASE = "01A1FC75-167D-7239-AF57-D1EE1A62E0A6"


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Catalog:
    """Orders, with three versions of one event, and baskets on the same topic; invoices on another one."""
    events = Events(tmp_path_factory.mktemp("events"))
    events.aggregate(
        "order",
        SHARED,
        placed_v1=payload(QUANTITY, ("quantity",)),
        placed_v2=payload(QUANTITY | UNIT, ("quantity", "unit")),
        placed_v3=payload(QUANTITY | UNIT | {"is_gift": {"type": "boolean"}}, ("quantity", "unit", "is_gift")),
        cancelled_v1=payload({"reason": {"type": ["string", "null"]}}),
    )
    events.write("order/upcast.py", UPCAST)
    events.aggregate("basket", SHARED, filled_v1=payload())
    events.aggregate("invoice", sent_v1=payload())
    return events.load()


KINDS: dict[str, Record] = {
    "placed.v1": record("placed", PLACED),
    "placed.v3": record("placed", PLACED_3, 3),
    "placed.v4": record("placed", PLACED_3, 4),
    "placed.v01": record("placed", PLACED, "01"),
    "placed.vx y": record("placed", PLACED, "x y"),
    "cancelled": record("cancelled", PLAIN),
    "filled": record("filled", PLAIN),
    "filled.v2": record("filled", PLAIN, 2),
    "lost": record("lost.and-found", PLAIN),
    "no word": record("no word", PLAIN),
}
# By what a sink asks for: of each kind the event, the name under which it is skipped, or why it is a dead letter.
OUTCOMES: dict[tuple[str, ...], dict[str, str]] = {
    ("order",): {
        "placed.v1": "order.placed",
        "placed.v3": "order.placed",
        "placed.v4": "unknown schema version",
        "placed.v01": "unknown schema version",
        "placed.vx y": "unknown schema version",
        "cancelled": "order.cancelled",
        "filled": "skipped basket.filled",
        "filled.v2": "skipped basket.filled",
        "lost": "unknown event type",
        "no word": "unknown event type",
    },
    ("order.placed",): {
        "placed.v1": "order.placed",
        "placed.v4": "unknown schema version",
        "cancelled": "skipped order.cancelled",
        "filled": "skipped basket.filled",
        "lost": "skipped *.lost.and-found",
        "no word": "skipped ?",
    },
    ("order.placed.v1", "basket.filled"): {
        "placed.v1": "order.placed.v1",
        "placed.v3": "skipped order.placed.v3",
        "placed.v4": "skipped order.placed.v4",
        "placed.vx y": "skipped ?",
        "cancelled": "skipped order.cancelled",
        "filled": "basket.filled",
        "filled.v2": "unknown schema version",
        "lost": "skipped *.lost.and-found",
    },
    ("basket",): {"placed.v1": "skipped order.placed", "filled": "basket.filled", "lost": "unknown event type"},
}


@pytest.mark.parametrize(("names", "kind"), [(names, kind) for names, found in OUTCOMES.items() for kind in found])
def test_a_record_is_an_event_skipped_or_a_dead_letter(known: Catalog, names: tuple[str, ...], kind: str) -> None:
    decoded = both_ways(as_read(KINDS[kind]), decoder(known, *names))
    assert OUTCOMES[names][kind] in {
        *decoded.rows,
        *(f"skipped {name}" for name in decoded.skipped),
        *(dead.rejection.reason for dead in decoded.dead),
    }
    assert len(decoded.rows) + len(decoded.skipped) + len(decoded.dead) == 1


def test_a_skipped_event_may_be_anything_else(known: Catalog) -> None:
    """Nobody looks at what nobody wants: it may be no JSON, and have no id."""
    bad = KINDS["cancelled"]._replace(value=b"no JSON", key=None)
    bare = bad._replace(headers=[one for one in bad.headers if one[0] != "id"])
    decoded = both_ways(as_read(bad, bare), decoder(known, "order.placed"))
    assert decoded.skipped == {"order.cancelled": 2}
    assert decoded.dead == []


@pytest.mark.parametrize(("key", "is_dead"), [("a" * 1000, False), ("ä" * 501, True)])
def test_a_key_has_at_most_1000_bytes(known: Catalog, key: str, is_dead: bool) -> None:
    event = record("filled", PLAIN | {"id": key})
    decoded = both_ways(as_read(record("filled", PLAIN), event), decoder(known, "basket"))
    assert [(one.rejection.reason, one.record) for one in decoded.dead] == [("schema violation", event)] * is_dead
    assert all("$.id" in one.rejection.detail for one in decoded.dead)


@pytest.mark.parametrize("key", [UPPER_CASE, f"{UPPER_CASE[:18].lower()}{UPPER_CASE[18:]}"])
def test_a_key_that_is_a_uuid_has_one_spelling(tmp_path: Path, key: str) -> None:
    """Two spellings would be two keys to Kafka and to `check`, and one to Postgres."""
    schema = payload({"id": {"type": "string", "format": "uuid"}})
    known = Events(tmp_path).aggregate("order", placed_v1=schema).load()
    good, bad = (record("placed", PLAIN | {"id": one}) for one in (UPPER_CASE.lower(), key))
    for decoding in (decoder(known, "order"), pickle.loads(pickle.dumps(decoder(known, "order")))):  # noqa: S301
        decoded = both_ways(as_read(good, bad), decoding)
        assert [len(columns["offset"]) for columns in decoded.rows.values()] == [1]
        [dead] = decoded.dead
        assert (dead.record, dead.rejection.reason) == (bad, "schema violation")
        assert "$.id" in dead.rejection.detail


class Lines(RecordDecoder):
    """Decodes records that are no events of the outbox: each is a key."""

    key = "line"
    types = MappingProxyType({"line": (Column("line", "text", is_nullable=False),)})

    def record(self, record: Record) -> DecodedEvent:
        """The line of a record."""
        return DecodedEvent("0" * 32, ((record.value or b"").decode(),), "line")


def test_the_keys_of_other_decoders_are_bounded_too() -> None:
    decoded = Lines().decode(as_read(Record(None, [], b"a" * 1000, 0), Record(None, [], b"a" * 1001, 0)))
    assert (len(decoded.rows["line"]["offset"]), len(decoded.dead)) == (1, 1)


class TestUpcasting:
    @pytest.mark.parametrize(
        ("version", "value", "unit", "is_gift"), [(1, PLACED, "PCE", True), (2, PLACED_2, "KGM", False)]
    )
    def test_an_older_version_has_the_columns_of_the_newest(
        self, known: Catalog, version: int, value: dict[str, Any], unit: str, is_gift: bool
    ) -> None:
        decoded = both_ways(as_read(record("placed", value, version)), decoder(known, "order"))
        (row,) = rows_of(decoded.rows["order.placed"])
        assert [*row][3:] == ["id", "number", "quantity", "unit", "is_gift"]
        assert [*row.values()][3:] == ["a", 1, 2, unit, is_gift]

    @pytest.mark.parametrize(
        ("quantity", "detail"),
        [
            (13, "placed_v1: ValueError: unlucky"),
            (66, "placed_v2: $.unit"),
            (77, "it changes the id"),
            (88, "it changes the number"),
        ],
    )
    def test_a_failure_sets_the_event_aside(self, known: Catalog, quantity: int, detail: str) -> None:
        records = [record("placed", PLACED | {"quantity": number}) for number in (1, quantity, 2)]
        decoded = both_ways(as_read(*records), decoder(known, "order"))
        (dead,) = decoded.dead
        assert (dead.offset, dead.rejection.reason) == (1, "upcast failed")
        assert detail in dead.rejection.detail
        assert [*decoded.rows["order.placed"]["offset"]] == [0, 2]


@pytest.mark.parametrize("names", OUTCOMES)
def test_no_sink_skips_what_it_asks_for(known: Catalog, names: tuple[str, ...]) -> None:
    decoding = decoder(known, *names)
    assert not decoding.wanted_names & both_ways(as_read(*KINDS.values()), decoding).skipped.keys()


MIXED = [
    *KINDS.values(),
    *(record("placed", PLACED | {"quantity": number}) for number in (13, 66, 77, 88, 100)),
    KINDS["placed.v3"]._replace(value=b"{"),
    KINDS["placed.v3"]._replace(key=b"other"),
    KINDS["placed.v3"]._replace(headers=[("id", b"\xff"), *KINDS["placed.v3"].headers[1:]]),
    KINDS["cancelled"]._replace(headers=[("eventType", b"\xff"), *KINDS["cancelled"].headers]),
    KINDS["cancelled"]._replace(value=None),
]


@pytest.mark.parametrize("names", OUTCOMES, ids=" ".join)
@given(data=st.data())
def test_a_mixture_by_columns_or_one_by_one_comes_to_the_same(
    known: Catalog, names: tuple[str, ...], data: st.DataObject
) -> None:
    both_ways(as_read(*data.draw(st.lists(st.sampled_from(MIXED), max_size=8))), decoder(known, *names))


def test_places_stay_with_their_records(known: Catalog) -> None:
    records = as_read(*(KINDS[kind] for kind in ("filled", "placed.v1", "cancelled", "placed.v4", "placed.v3")))
    decoded = decoder(known, "order").decode(replace(records, partitions=[4, 3, 2, 1, 0], offsets=range(10, 60, 10)))
    columns = decoded.rows.values()
    places = {place for one in columns for place in zip(one["partition"], one["offset"], strict=True)}
    assert places == {(3, 20), (2, 30), (0, 50)}
    assert [(dead.partition, dead.offset) for dead in decoded.dead] == [(1, 40)]
