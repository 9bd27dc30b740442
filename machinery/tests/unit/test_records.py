"""The one validator: what is wrong with a record, on the corpus of good and bad ones, and what its event is."""

from __future__ import annotations

from datetime import UTC, datetime
from operator import itemgetter
from typing import Any

import pytest
from confluent_kafka import Message

from outbox.events.schema import Rejection
from outbox.kafka.records import size_bytes
from outbox.sink.decoding.decoder import AT_ONCE, FUTURE_MAX_MS, DecodedEvent, EventDecoder, RecordDecoder, Skipped
from outbox.sink.decoding.records import Decoded, Record, Records
from outbox.sink.decoding.values import Columns, rows_of
from tests.support.made_events import DECODER, NOW_MS, as_read
from tests.support.record_corpus import GOOD, HEADERS, HEADERS_OF, ID, KEY, VALUES, changed, raw, record

NAME = f"item.{HEADERS['eventType']}"
MOMENT = datetime(2026, 11, 21, 5, 0, 0, 123456, tzinfo=UTC)
FACTS = GOOD | {"occurred_at": MOMENT, "event_type": NAME, "event_id": ID, "partition": 1, "offset": 7}


def reason(one: Record) -> str | None:
    found = DECODER.record(one)
    return found.reason if isinstance(found, Rejection) else None


def event(one: Record) -> dict[str, Any]:
    found = DECODER.record(one)
    assert isinstance(found, DecodedEvent), found
    ((name, rows),) = DECODER.rows([(found, 1, 7)]).items()
    (facts,) = rows_of(rows)
    return {"event_type": name, **facts}


@pytest.mark.parametrize("name", VALUES)
def test_the_fault_of_a_value_is_found(name: str) -> None:
    value, expected = VALUES[name]
    assert reason(record(value)) == expected


@pytest.mark.parametrize("name", HEADERS_OF)
def test_the_fault_of_headers_is_found(name: str) -> None:
    headers, expected = HEADERS_OF[name]
    assert reason(record(headers=headers)) == expected


@pytest.mark.parametrize("key", [b"other", None, b"\xff", b"", KEY.upper().encode() + b"\n"])
def test_a_key_that_is_not_the_item_is_reported(key: bytes | None) -> None:
    assert DECODER.record(record(key=key)) == ("key mismatch", "the record's key is not its item_id")


def test_the_detail_names_what_is_wrong() -> None:
    for one, part in (
        (record(changed(quantity="5")), '$.quantity: "5" is not of type "integer"'),
        (record(headers=HEADERS | {"eventType": "never.heard"}), "header eventType"),
        (record(headers={"id": ID, "eventType": "picked"}), "header schemaVersion"),
        (record(changed(unit="x" * 1_000_000)), "$.unit"),
    ):
        found = DECODER.record(one)
        assert isinstance(found, Rejection)
        assert part in found.detail
        assert len(found.detail) < 300, "it is short, however long the value"


def test_an_event_has_the_columns_of_the_schema_and_no_others() -> None:
    assert event(record(changed(note="a\0"))) == FACTS
    assert event(record()) == FACTS


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
    assert reason(one) is not None if number is None else event(one) == FACTS | {"quantity": number}


def test_of_a_header_that_comes_twice_the_last_counts() -> None:
    twice = record()
    twice = twice._replace(headers=[("id", b"words"), *twice.headers])
    assert event(twice) == FACTS
    assert DECODER.event_id(twice) == ID


@pytest.mark.parametrize(
    ("headers", "event_id"),
    [(HEADERS, ID), ({}, None), ({"id": None}, None), ({"id": "words"}, None), ({"id": ID + "\n"}, None)],
    ids=["a UUID", "no id", "null", "words", "a UUID and a line end"],
)
def test_a_record_is_known_by_its_id_if_that_is_a_uuid(headers: dict[str, Any], event_id: str | None) -> None:
    assert DECODER.event_id(record(b"bad", headers)) == event_id


CORPUS = [
    *(record(value) for value, _ in VALUES.values()),
    *(record(headers=headers) for headers, _ in HEADERS_OF.values()),
    *(record(key=key) for key in (b"other", None, b"\xff")),
    *(record(recorded_ms=NOW_MS + late_ms) for late_ms in (-FUTURE_MAX_MS, FUTURE_MAX_MS, -(2**52), 2**52)),
    record(recorded_ms=-1),
    record()._replace(headers=[*record().headers, ("binary", b"\xff")]),
    record()._replace(headers=[("id", b"words"), *record().headers]),
    record()._replace(headers=[*record().headers, ("id", b"words")]),
]


def sorted_rows(columns: Columns) -> list[dict[str, Any]]:
    return sorted(rows_of(columns), key=lambda row: (row["partition"], row["offset"]))


def count(decoded: Decoded) -> int:
    return sum(len(columns["offset"]) for columns in decoded.rows.values())


def both_ways(records: Records, decoder: RecordDecoder = DECODER) -> Decoded:
    """The records as their decoder decodes them; one by one it comes to the same."""
    decoded, expected = decoder.decode(records), RecordDecoder.decode(decoder, records)
    assert {name: sorted_rows(columns) for name, columns in decoded.rows.items()} == {
        name: sorted_rows(columns) for name, columns in expected.rows.items()
    }
    assert sorted(decoded.dead, key=itemgetter(1)) == sorted(expected.dead, key=itemgetter(1))
    assert dict(decoded.skipped) == dict(expected.skipped)
    return decoded


def test_a_header_weighs_what_its_objects_take() -> None:
    many = Message("t", 0, 1, value=b"v", headers=[("h", b"")] * 10_000)
    assert size_bytes([many]) >= 1_000_000


class TestRecords:
    """Records as they are read, many at once."""

    @pytest.mark.parametrize("name", VALUES)
    def test_one_validator_for_the_stream_and_for_single_records(self, name: str) -> None:
        value, expected = VALUES[name]
        decoded = DECODER.decode(as_read(record(), record(value), record()))
        assert [one.rejection.reason for one in decoded.dead] == ([] if expected is None else [expected])
        assert count(decoded) == (3 if expected is None else 2)

    @pytest.mark.parametrize("one", CORPUS)
    def test_by_columns_or_one_by_one_comes_to_the_same(self, one: Record) -> None:
        both_ways(as_read(one))
        both_ways(as_read(record(), one))

    def test_a_bad_record_costs_only_its_neighbours_the_fast_way(self, monkeypatch: pytest.MonkeyPatch) -> None:
        looked_at: list[Record] = []
        one_by_one = type(DECODER).record

        def noted(self: EventDecoder, one: Record) -> DecodedEvent | Rejection | Skipped:
            looked_at.append(one)
            return one_by_one(self, one)

        monkeypatch.setattr(type(DECODER), "record", noted)
        good = as_read(*[record()] * AT_ONCE, *[record(VALUES["wide"][0])] * AT_ONCE)
        assert count(DECODER.decode(good)) == 2 * AT_ONCE
        assert not looked_at
        decoded = DECODER.decode(as_read(*[record()] * 2 * AT_ONCE, record(b"bad")))
        assert (count(decoded), len(decoded.dead), len(looked_at)) == (2 * AT_ONCE, 1, 1)
