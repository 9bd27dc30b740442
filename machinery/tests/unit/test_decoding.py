"""From records to batches. The one validator: what is wrong with a record, on the corpus of good and bad ones, and what
its event is; which records of a topic a sink decodes. Whatever shares records are read in, and whether the driver or a
task reads them, the sink gets the same; how a batch is divided, and what tasks are given.
"""

from __future__ import annotations

import pickle
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from outbox.base.settings import SECRET_NAMES, Secret, load
from outbox.events.catalog import Catalog
from outbox.events.schema import Column, Rejection, SqlType
from outbox.kafka.records import Part
from outbox.sink.applying.postgres.transforming import storable
from outbox.sink.decoding.batch import Chunk
from outbox.sink.decoding.binary import Encoded
from outbox.sink.decoding.decoder import AT_ONCE, FUTURE_MAX_MS, DecodedEvent, EventDecoder, RecordDecoder, Skipped
from outbox.sink.decoding.layout import Layout
from outbox.sink.decoding.records import Decoded, Record, Records
from outbox.sink.decoding.values import Columns, rows_of
from outbox.sink.spark.reader import Read, ReadTask
from outbox_lab.testing.failures import raises
from tests.support.declared import TOML, Events, payload
from tests.support.declared_sinks import decoder
from tests.support.declared_sinks import record as sent
from tests.support.made_events import DECODER, MAIN, NOW_MS, TOPIC, Event, as_read, nth_key, uuid7
from tests.support.record_corpus import GOOD, HEADERS, HEADERS_OF, ID, KEY, VALUES, raw, record

NAME = f"item.{HEADERS['eventType']}"
MOMENT = datetime(2026, 11, 21, 5, 0, 0, 123456, tzinfo=UTC)
FACTS = GOOD | {"occurred_at": MOMENT, "event_type": NAME, "event_id": ID, "partition": 1, "offset": 7}


def event(one: Record) -> dict[str, Any]:
    found = DECODER.record(one)
    assert isinstance(found, DecodedEvent), found
    ((name, rows),) = DECODER.rows([(found, 1, 7)]).items()
    (facts,) = rows_of(rows)
    return {"event_type": name, **facts}


def sorted_rows(columns: Columns) -> list[dict[str, Any]]:
    return sorted(rows_of(columns), key=lambda row: (row["partition"], row["offset"]))


def both_ways(records: Records, decoder: RecordDecoder = DECODER) -> Decoded:
    """The records as their decoder decodes them; one by one it comes to the same."""
    decoded, expected = decoder.decode(records), RecordDecoder.decode(decoder, records)
    assert {name: sorted_rows(columns) for name, columns in decoded.rows.items()} == {
        name: sorted_rows(columns) for name, columns in expected.rows.items()
    }
    assert sorted(decoded.dead, key=itemgetter(1)) == sorted(expected.dead, key=itemgetter(1))
    assert dict(decoded.skipped) == dict(expected.skipped)
    return decoded


@pytest.mark.parametrize(
    ("text", "number"),
    [
        *(("7", 7), ("7.0", 7), ("5e0", 5), ("1E+3", 1000), ("-70e-1", -7), ('1, "quantity": 7', 7)),
        *(("9007199254740993.0", 9007199254740993), ("9007199254740993.5", None), ("0.5", None)),
        *((text, None) for text in ("1e999999999", "1e-99999999999999999999", "1e99999999999999999999")),
    ],
)
def test_an_integer_is_read_exactly_however_it_is_written_or_refused(text: str, number: int | None) -> None:
    one = record(raw("quantity", text))
    if number is None:
        assert isinstance(DECODER.record(one), Rejection)
    else:
        assert event(one) == FACTS | {"quantity": number}


@pytest.mark.parametrize(
    ("headers", "event_id"),
    [(HEADERS, ID), ({}, None), ({"id": None}, None), ({"id": "words"}, None), ({"id": ID + "\n"}, None)],
    ids=["a UUID", "no id", "null", "words", "a UUID and a line end"],
)
def test_a_record_is_known_by_its_id_if_that_is_a_uuid(headers: dict[str, Any], event_id: str | None) -> None:
    assert DECODER.event_id(record(b"bad", headers)) == event_id


# By name: a record, and why it is no event; None for an event.
CORPUS: dict[str, tuple[Record, str | None]] = {
    **{f"value: {name}": (record(value), reason) for name, (value, reason) in VALUES.items()},
    **{f"headers: {name}": (record(headers=headers), reason) for name, (headers, reason) in HEADERS_OF.items()},
    **{f"key: {key!r}": (record(key=key), "key mismatch") for key in (b"other", None, b"\xff", b"")},
    "key and a line end": (record(key=f"{KEY}\n".encode()), "key mismatch"),
    "recorded a day before": (record(recorded_ms=NOW_MS - FUTURE_MAX_MS), None),
    "recorded ages after": (record(recorded_ms=NOW_MS + 2**52), "id too old"),
    "recorded at no time": (record(recorded_ms=-1), None),
    "header that is no text": (record()._replace(headers=[*record().headers, ("binary", b"\xff")]), None),
    "of two ids the last": (record()._replace(headers=[("id", b"words"), *record().headers]), None),
    "of two ids the last is wrong": (record()._replace(headers=[*record().headers, ("id", b"words")]), "malformed id"),
}


@pytest.mark.parametrize("name", CORPUS)
def test_the_fault_of_a_record_is_found_by_columns_and_one_by_one(name: str) -> None:
    one, expected = CORPUS[name]
    for records in (as_read(one), as_read(record(), one, record())):
        decoded = both_ways(records)
        assert [dead.rejection.reason for dead in decoded.dead] == ([] if expected is None else [expected])
        count = sum(len(columns["offset"]) for columns in decoded.rows.values())
        assert count + len(decoded.dead) == len(records.offsets)


def test_a_bad_record_costs_only_its_neighbours_the_fast_way(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[Record] = []
    one_by_one = type(DECODER).record

    def noted(self: EventDecoder, one: Record) -> DecodedEvent | Rejection | Skipped:
        looked_at.append(one)
        return one_by_one(self, one)

    monkeypatch.setattr(type(DECODER), "record", noted)
    assert not DECODER.decode(as_read(*[record()] * AT_ONCE, *[record(VALUES["wide"][0])] * AT_ONCE)).dead
    assert not looked_at
    decoded = DECODER.decode(as_read(*[record()] * 2 * AT_ONCE, record(b"bad")))
    assert (len(decoded.dead), len(looked_at)) == (1, 1)


# Which records a sink decodes: exactly the events that it asks for, in the newest version -----------------------------


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
    "placed.v1": sent("placed", PLACED),
    "placed.v3": sent("placed", PLACED_3, 3),
    "placed.v4": sent("placed", PLACED_3, 4),
    "placed.v01": sent("placed", PLACED, "01"),
    "placed.vx y": sent("placed", PLACED, "x y"),
    "cancelled": sent("cancelled", PLAIN),
    "filled": sent("filled", PLAIN),
    "filled.v2": sent("filled", PLAIN, 2),
    "lost": sent("lost.and-found", PLAIN),
    "no word": sent("no word", PLAIN),
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
    event = sent("filled", PLAIN | {"id": key})
    decoded = both_ways(as_read(sent("filled", PLAIN), event), decoder(known, "basket"))
    assert [(one.rejection.reason, one.record) for one in decoded.dead] == [("schema violation", event)] * is_dead
    assert all("$.id" in one.rejection.detail for one in decoded.dead)


@pytest.mark.parametrize("key", [UPPER_CASE, f"{UPPER_CASE[:18].lower()}{UPPER_CASE[18:]}"])
def test_a_key_that_is_a_uuid_has_one_spelling(tmp_path: Path, key: str) -> None:
    """Two spellings would be two keys to Kafka and to `check`, and one to Postgres."""
    schema = payload({"id": {"type": "string", "format": "uuid"}})
    known = Events(tmp_path).aggregate("order", placed_v1=schema).load()
    good, bad = (sent("placed", PLAIN | {"id": one}) for one in (UPPER_CASE.lower(), key))
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
        decoded = both_ways(as_read(sent("placed", value, version)), decoder(known, "order"))
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
        records = [sent("placed", PLACED | {"quantity": number}) for number in (1, quantity, 2)]
        decoded = both_ways(as_read(*records), decoder(known, "order"))
        (dead,) = decoded.dead
        assert (dead.offset, dead.rejection.reason) == (1, "upcast failed")
        assert detail in dead.rejection.detail
        assert [*decoded.rows["order.placed"]["offset"]] == [0, 2]


MIXED = [
    *KINDS.values(),
    *(sent("placed", PLACED | {"quantity": number}) for number in (13, 66, 77, 88, 100)),
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


# Batches ------------------------------------------------------------------------------------------------------------

RANDOM = Random(11)  # noqa: S311
UNFRAMED, FRAMED = MAIN.chunking(TOPIC), replace(MAIN.chunking(TOPIC), as_frame=True)
MANY = [
    *(record(value) for value, _ in VALUES.values()),
    *(record(headers=one) for one, _ in HEADERS_OF.values()),
]

Row = dict[str, bytes | None]


def good(number: int) -> Record:
    return Event(uuid7(RANDOM), nth_key(number % 5), 1 + number, version=number + 1).record


RECORDS = [good(number) if number % 2 else MANY[number // 2] for number in range(2 * len(MANY))]


def read(records: Sequence[Record], start: int = 0) -> Records:
    """Records as they are read from an offset on."""
    return replace(as_read(*records, partition=0), offsets=range(start, start + len(records)))


def copied_rows(encoded: Sequence[Encoded]) -> Iterator[Row]:
    """The rows of a COPY, each by the names of its columns."""
    for columns, pieces in encoded:
        content, at = b"".join(pieces), 0
        while at < len(content):
            (count,) = struct.unpack_from(">h", content, at)
            assert count == len(columns)
            at += 2
            row = Row()
            for column in columns:
                (length,) = struct.unpack_from(">i", content, at)
                at += 4
                row[column] = None if length < 0 else content[at : at + length]
                at += max(length, 0)
            yield row


def rows_by_offset(encoded: Sequence[Encoded]) -> dict[bytes | None, Row]:
    return {row["offset"]: row for row in copied_rows(encoded)}


@example({1, 2}, 1)  # each chunk has one record
@example(set[int](), 10**9)  # all are in one
@settings(max_examples=12)  # of a second each
@given(st.sets(st.integers(1, len(RECORDS) - 1), max_size=6), st.integers(1, 200_000))
def test_chunks_of_any_shares_come_to_the_same(cuts: set[int], max_bytes: int) -> None:
    """A task may end early, and another one goes on where it has ended."""
    chunks = {True: list[Chunk](), False: list[Chunk]()}
    for chunking, found in zip((FRAMED, UNFRAMED), (chunks[True], chunks[False]), strict=True):
        for start, end in zip([0, *sorted(cuts)], [*sorted(cuts), len(RECORDS)], strict=True):
            at = start
            while at < end:
                singly = (read([one], offset) for offset, one in enumerate(RECORDS[at:end], at))
                chunk, reached = chunking.first(singly, max_bytes)
                found.append(Read.of_chunk(chunk, reached).chunk)
                assert reached is None or at < reached[0] <= end
                at = end if reached is None else reached[0]
    whole, together = UNFRAMED.chunk(read(RECORDS)), Chunk.together(chunks[False])
    assert rows_by_offset(together.rows) == rows_by_offset(whole.rows)
    assert rows_by_offset(together.dead) == rows_by_offset(whole.dead)
    assert (together.count, together.dead_count) == (whole.count, whole.dead_count)
    assert together.count + together.dead_count == len(RECORDS)
    assert {*together.days} == {*whole.days}
    events, all_at_once = Chunk.together(chunks[True]).events, FRAMED.chunk(read(RECORDS)).events
    assert events is not None
    assert all_at_once is not None
    assert events.sort_by("offset").to_pylist() == all_at_once.sort_by("offset").to_pylist()
    ids = [bytes.fromhex(one.replace("-", "")) for one in events["event_id"].to_pylist()]
    assert Counter(row["event_id"] for row in copied_rows(whole.rows)) == Counter(ids)


RANGES = st.dictionaries(st.integers(0, 9), st.tuples(st.integers(0, 2**62), st.integers(0, 10**6)), max_size=5)


@given(RANGES, st.integers(1, 30))
@example(dict.fromkeys(range(150), (7, 1)), 2)  # half of what a transform fails for, with a record a partition
def test_parts_follow_each_other_and_are_of_one_size(ranges: dict[int, tuple[int, int]], count: int) -> None:
    start = {partition: first for partition, (first, _) in ranges.items()}
    end = {partition: first + more for partition, (first, more) in ranges.items()}
    parts = Part("t", start, end).divided(count)
    assert len(parts) == count
    assert (parts[0].start, parts[-1].end) == (start, end)
    assert all(one.end == following.start for one, following in pairwise(parts))
    assert all(end >= part.start[partition] for part in parts for partition, end in part.end.items())
    counts = [part.count for part in parts]
    assert max(counts) - min(counts) <= 1


def test_a_task_knows_the_passwords_that_it_needs_alone(tmp_path: Path) -> None:
    known = load(tmp_path, environment=False).replace(**{one: Secret(f"secret of {one}") for one in SECRET_NAMES})
    sent = pickle.dumps(ReadTask.of_sink(known, UNFRAMED, TOPIC, max_bytes=1))
    assert {name for name in SECRET_NAMES if f"secret of {name}".encode() in sent} == {"kafka_password"}


# How the events of a sink lie in its tables ---------------------------------------------------------------------------


ID_TEXT, PRICE = Column("id", "text", is_nullable=False), Column("price", "bigint", is_nullable=False)
NOTE = Column("note", "text", is_nullable=True)
EXACT = Column("price", "numeric", is_nullable=False)


def test_several_events_share_columns_of_one_name_and_type() -> None:
    events = {
        "a.x": [ID_TEXT, PRICE],
        "a.y": [ID_TEXT._replace(is_nullable=True), EXACT, NOTE],
        "b.z": [ID_TEXT, EXACT],
    }
    for chosen in (events, dict(reversed(events.items()))):
        layout = Layout(chosen)
        assert {(column.name, column.type, column.is_nullable) for column in layout.columns} == {
            ("event_type", "text", False),
            ("id", "text", True),
            ("price:bigint", "bigint", True),
            ("price:numeric", "numeric", True),
            ("note", "text", True),
        }
    assert not Layout({"a.x": [ID_TEXT], "a.y": [ID_TEXT]}).columns[1].is_nullable


def test_columns_of_all_events_fit_into_one_table() -> None:
    def wide(count: int, prefix: str) -> Sequence[Column]:
        return [Column(f"{prefix}{number}", "boolean", is_nullable=True) for number in range(count)]

    assert len(Layout({"a.x": wide(800, "p"), "a.y": wide(699, "q")}).columns) == 1500
    with raises("sink-unusable", "a.x, a.y have 1501 columns"):
        Layout({"a.x": wide(801, "p"), "a.y": wide(699, "q")})


@pytest.mark.parametrize("names", [("a.b_c", "a.b-c"), ("a.b_c", "a.B_C"), ("a.b_c", "a-b.c"), (f"a.{'x' * 58}",)])
def test_views_of_one_name_or_with_one_that_postgres_would_cut_off_are_refused(names: tuple[str, ...]) -> None:
    with raises("sink-unusable", *names):
        Layout({name: [ID_TEXT] for name in names})


class TestReturned:
    """Rows that a transform has returned."""

    @pytest.mark.parametrize(
        ("type_", "value"),
        [
            ("text", pa.array(["a\0"])),
            ("text", pa.array([b"\xff"]).view(pa.string())),
            *(("uuid", pa.array([text])) for text in ("", "0" * 32)),
            *(("jsonb", pa.array([text])) for text in (r'["a\u0000"]', "[1")),
            *(("numeric", pa.array([text])) for text in ("abc", "NaN", "1" * 4301)),
            ("timestamptz", pa.array([300_000 * 10**12], pa.timestamp("us", tz="UTC"))),
        ],
    )
    def test_a_value_that_postgres_would_refuse_is_named(self, type_: SqlType, value: pa.Array) -> None:
        place = {"event_id": ["a"], "partition": pa.array([0], pa.int32()), "offset": pa.array([0], pa.int64())}
        with pytest.raises(ValueError, match="column it: "):
            storable(pa.table({**place, "it": value}), [Column("it", type_, is_nullable=True)])
