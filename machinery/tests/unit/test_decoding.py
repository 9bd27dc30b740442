"""Which records of a topic a sink decodes: exactly the events that it asks for, in the newest version."""

from __future__ import annotations

import pickle
from collections import Counter
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox.events.catalog import Catalog
from outbox.events.schema import Column, Rejection
from outbox.sink.decoding.decoder import AT_ONCE, DecodedEvent, EventDecoder, RecordDecoder, Skipped
from outbox.sink.decoding.records import Record, Records
from outbox.sink.decoding.values import rows_of
from tests.support.declared import TOML, Events, payload
from tests.support.declared_sinks import decoder, decoders, record
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
COLUMNS = {
    "order.placed": ["id", "number", "quantity", "unit", "is_gift"],
    "order.placed.v1": ["id", "number", "quantity"],
    "order.cancelled": ["id", "number", "reason"],
    "basket.filled": ["id", "number"],
}


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


def outcome(found: DecodedEvent | Rejection | Skipped) -> object:
    """The outcome of a record, in short."""
    return found.reason if isinstance(found, Rejection) else (type(found).__name__, found.name)


EVENT, SKIPPED = DecodedEvent.__name__, Skipped.__name__
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
UNKNOWN_TYPE, UNKNOWN_VERSION = "unknown event type", "unknown schema version"
OUTCOMES: dict[tuple[str, ...], dict[str, object]] = {
    ("order",): {
        "placed.v1": (EVENT, "order.placed"),
        "placed.v3": (EVENT, "order.placed"),
        "placed.v4": UNKNOWN_VERSION,
        "placed.v01": UNKNOWN_VERSION,
        "placed.vx y": UNKNOWN_VERSION,
        "cancelled": (EVENT, "order.cancelled"),
        "filled": (SKIPPED, "basket.filled"),
        "filled.v2": (SKIPPED, "basket.filled"),
        "lost": UNKNOWN_TYPE,
        "no word": UNKNOWN_TYPE,
    },
    ("order.placed",): {
        "placed.v1": (EVENT, "order.placed"),
        "placed.v3": (EVENT, "order.placed"),
        "placed.v4": UNKNOWN_VERSION,
        "placed.v01": UNKNOWN_VERSION,
        "placed.vx y": UNKNOWN_VERSION,
        "cancelled": (SKIPPED, "order.cancelled"),
        "filled": (SKIPPED, "basket.filled"),
        "lost": (SKIPPED, "*.lost.and-found"),
        "no word": (SKIPPED, "?"),
    },
    ("order.placed.v1", "basket.filled"): {
        "placed.v1": (EVENT, "order.placed.v1"),
        "placed.v3": (SKIPPED, "order.placed.v3"),
        "placed.v4": (SKIPPED, "order.placed.v4"),
        "placed.vx y": (SKIPPED, "?"),
        "cancelled": (SKIPPED, "order.cancelled"),
        "filled": (EVENT, "basket.filled"),
        "filled.v2": UNKNOWN_VERSION,
        "lost": (SKIPPED, "*.lost.and-found"),
    },
    ("basket",): {"placed.v1": (SKIPPED, "order.placed"), "filled": (EVENT, "basket.filled"), "lost": UNKNOWN_TYPE},
}


@pytest.mark.parametrize(("names", "kind"), [(names, kind) for names, found in OUTCOMES.items() for kind in found])
def test_a_record_is_an_event_skipped_or_a_dead_letter(known: Catalog, names: tuple[str, ...], kind: str) -> None:
    expected = OUTCOMES[names][kind]
    decoding = decoder(known, *names)
    assert outcome(decoding.record(KINDS[kind])) == expected
    decoded = both_ways(as_read(KINDS[kind]), decoding)
    of_event = {expected[1]: 1} if isinstance(expected, tuple) and expected[0] == EVENT else {}
    assert {name: len(columns["offset"]) for name, columns in decoded.rows.items()} == of_event
    assert sum(decoded.skipped.values()) + len(decoded.dead) + len(of_event) == 1


def test_a_topic_without_wanted_events_has_no_decoder(known: Catalog) -> None:
    assert set(decoders(known, "order", "invoice.sent")) == {"shop.all", "shop.invoice"}
    assert set(decoders(known, "invoice")) == {"shop.invoice"}


def test_a_skipped_event_may_be_anything_else(known: Catalog) -> None:
    """Nobody looks at what nobody wants: it may be no JSON, and have no id."""
    bad = KINDS["cancelled"]._replace(value=b"no JSON", key=None)
    bare = bad._replace(headers=[one for one in bad.headers if one[0] != "id"])
    decoded = both_ways(as_read(bad, bare), decoder(known, "order.placed"))
    assert decoded.skipped == {"order.cancelled": 2}
    assert decoded.dead == []


def test_a_record_without_a_type_is_set_aside(known: Catalog) -> None:
    nameless = KINDS["cancelled"]._replace(headers=[one for one in KINDS["cancelled"].headers if one[0] == "id"])
    assert outcome(decoder(known, "order.placed").record(nameless)) == UNKNOWN_TYPE


@pytest.mark.parametrize(("key", "is_dead"), [("a" * 1000, False), ("ä" * 501, True)])
def test_a_key_has_at_most_1000_bytes(known: Catalog, key: str, is_dead: bool) -> None:
    event = record("filled", PLAIN | {"id": key})
    decoded = both_ways(as_read(record("filled", PLAIN), event), decoder(known, "basket"))
    assert [(one.rejection.reason, one.record) for one in decoded.dead] == [("schema violation", event)] * is_dead
    assert all("$.id" in one.rejection.detail for one in decoded.dead)


@pytest.mark.parametrize(("key", "is_dead"), [(b"", False), (None, True)])
def test_no_key_is_not_the_empty_key(known: Catalog, key: bytes | None, is_dead: bool) -> None:
    event = record("filled", PLAIN | {"id": ""})._replace(key=key)
    decoded = both_ways(as_read(event), decoder(known, "basket"))
    assert [one.rejection.reason for one in decoded.dead] == ["key mismatch"] * is_dead


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


def test_rows_have_the_columns_of_their_event(known: Catalog) -> None:
    for names in (("order", "basket"), ("order.placed.v1",)):
        decoded = both_ways(as_read(*KINDS.values()), decoder(known, *names))
        for name, columns in decoded.rows.items():
            assert [*columns] == ["event_id", "partition", "offset", *COLUMNS[name]]


class TestUpcasting:
    @pytest.mark.parametrize(
        ("version", "value", "unit", "is_gift"), [(1, PLACED, "PCE", True), (2, PLACED_2, "KGM", False)]
    )
    def test_an_older_version_has_the_columns_of_the_newest(
        self, known: Catalog, version: int, value: dict[str, Any], unit: str, is_gift: bool
    ) -> None:
        decoded = both_ways(as_read(record("placed", value, version)), decoder(known, "order"))
        (row,) = rows_of(decoded.rows["order.placed"])
        assert (row["unit"], row["is_gift"], row["quantity"]) == (unit, is_gift, 2)

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

    def test_the_payload_is_validated_by_its_own_version_first(self, known: Catalog) -> None:
        found = decoder(known, "order").record(record("placed", PLACED | {"quantity": 100}))
        assert isinstance(found, Rejection)
        assert found.reason == "schema violation"

    def test_executors_need_no_file(self, known: Catalog) -> None:
        sent: EventDecoder = pickle.loads(pickle.dumps(decoder(known, "order")))  # noqa: S301
        upcast = known.folder / "order" / "upcast.py"
        text = upcast.read_text()
        upcast.unlink()
        try:
            assert [*both_ways(as_read(KINDS["placed.v1"]), sent).rows] == ["order.placed"]
        finally:
            upcast.write_text(text)


class TestAskedFor:
    """Names of events that a sink must not have skipped."""

    @pytest.mark.parametrize(
        ("names", "expected"),
        [
            (("basket",), {"basket.filled", "basket.filled.v1", "*.filled"}),
            (
                ("order.placed",),
                {"order.placed", "order.placed.v1", "order.placed.v2", "order.placed.v3", "*.placed"},
            ),
            (("order.placed.v1",), {"order.placed", "order.placed.v1", "*.placed"}),
        ],
    )
    def test_it_is_each_way_in_which_they_were_skipped(
        self, known: Catalog, names: tuple[str, ...], expected: set[str]
    ) -> None:
        assert decoder(known, *names).wanted_names == expected

    @pytest.mark.parametrize("names", OUTCOMES)
    def test_no_sink_skips_what_it_asks_for(self, known: Catalog, names: tuple[str, ...]) -> None:
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


def test_skipped_events_are_counted_over_parts(known: Catalog) -> None:
    some = as_read(*[KINDS["cancelled"], KINDS["lost"]] * AT_ONCE)
    assert len(some) > AT_ONCE
    expected = {"order.cancelled": AT_ONCE, "*.lost.and-found": AT_ONCE}
    decoding = decoder(known, "order.placed")
    assert dict(decoding.decode(some).skipped) == expected
    assert Counter(RecordDecoder.decode(decoding, some).skipped) == expected


def test_places_stay_with_their_records(known: Catalog) -> None:
    records = [KINDS[kind] for kind in ("filled", "placed.v1", "cancelled", "placed.v4", "placed.v3")]
    read = Records(
        keys=[one.key for one in records],
        headers=[one.headers for one in records],
        values=[one.value for one in records],
        recorded_ms=[one.recorded_ms for one in records],
        partitions=[4, 3, 2, 1, 0],
        offsets=[10, 20, 30, 40, 50],
    )
    decoded = decoder(known, "order").decode(read)
    places = {
        (partition, offset)
        for columns in decoded.rows.values()
        for partition, offset in zip(columns["partition"], columns["offset"], strict=True)
    }
    assert places == {(3, 20), (2, 30), (0, 50)}
    assert [(dead.partition, dead.offset) for dead in decoded.dead] == [(1, 40)]
