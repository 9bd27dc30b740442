"""Any event can be declared by its schema: types of columns, and what has no place in Postgres."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox.events.schema import Rejection, SqlType
from outbox.events.values import convert, convert_all
from outbox.sink.decoding.decoder import DecodedEvent, EventDecoder, Skipped
from outbox.sink.decoding.records import Record
from tests.support.declared import Events
from tests.support.declared_sinks import decoder
from tests.support.made_events import NOW_MS
from tests.support.record_corpus import ID

KEY = {"type": "string"}


def declare(folder: Path, properties: dict[str, Any], required: list[str], **uses: str) -> EventDecoder:
    document = {"type": "object", "properties": {"order": KEY, **properties}, "required": ["order", *required]}
    document |= {"$defs": {"code": {"type": "string", "pattern": "^[A-Z]{3}$"}}}
    toml = "".join(f'{use} = "{name}"\n' for use, name in {"key": "order", **uses}.items())
    return decoder(Events(folder).aggregate("order", toml, placed_v1=document).load(), "order")


def decode(decoder: EventDecoder, text: str) -> DecodedEvent | Rejection | Skipped:
    headers = [("id", ID.encode()), ("eventType", b"placed"), ("schemaVersion", b"1")]
    return decoder.record(Record(b"a", headers, text.encode(), NOW_MS))


@pytest.mark.parametrize(
    ("rule", "is_required", "type_", "is_nullable"),
    [
        ({"type": "string"}, True, "text", False),
        ({"type": "string"}, False, "text", True),
        ({"type": ["string", "null"]}, True, "text", True),
        ({"type": "string", "format": "uuid"}, True, "uuid", False),
        ({"type": "string", "format": "date-time"}, True, "timestamptz", False),
        ({"type": "integer"}, True, "numeric", False),
        ({"type": "integer", "minimum": 1, "maximum": 9}, True, "bigint", False),
        ({"type": "number"}, True, "numeric", False),
        ({"type": "boolean"}, True, "boolean", False),
        ({"type": "object"}, True, "jsonb", False),
        ({"type": "array"}, True, "jsonb", False),
        ({"enum": ["x", "y"]}, True, "text", False),
        ({"enum": ["x", None]}, True, "text", True),
        ({"$ref": "#/$defs/code"}, True, "text", False),
        ({}, True, "jsonb", True),
    ],
)
def test_a_property_becomes_a_column(
    tmp_path: Path, rule: dict[str, Any], is_required: bool, type_: str, is_nullable: bool
) -> None:
    declared = declare(tmp_path, {"it": rule}, ["it"] if is_required else [])
    assert declared.types["order.placed"][1] == ("it", type_, is_nullable)


@pytest.mark.parametrize(
    ("rule", "text", "value"),
    [
        ({"type": "number"}, "0.12345678901234567890123", "0.12345678901234567890123"),
        ({"type": "object"}, r'{"a":"\\u0000"}', r'{"a":"\\u0000"}'),
        ({"type": "array"}, "[{}, 1.10]", "[{},1.10]"),
        ({"enum": ["x", None]}, "null", None),
        ({"type": "boolean"}, "true", True),
        ({}, '{"any":[null]}', '{"any":[null]}'),
    ],
)
def test_a_value_is_read_exactly(tmp_path: Path, rule: dict[str, Any], text: str, value: object) -> None:
    found = decode(declare(tmp_path, {"it": rule}, ["it"]), f'{{"order": "a", "it": {text}}}')
    assert isinstance(found, DecodedEvent)
    assert found.values == ("a", value)


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ({"type": "object"}, r'{"a":"\u0000"}'),
        ({"type": "object"}, r'{"\u0000":1}'),
        ({"type": "object"}, r'{"a":"\\\u0000"}'),
        ({"type": "string", "format": "date-time"}, '"0001-01-01T00:00:00+23:59"'),
        ({"type": "string", "format": "date-time"}, '"9999-12-31T23:59:59-23:59"'),
        ({"$ref": "#/$defs/code"}, r'"EUR\n"'),
    ],
)
def test_what_postgres_cannot_hold_is_set_aside(tmp_path: Path, rule: dict[str, Any], text: str) -> None:
    found = decode(declare(tmp_path, {"it": rule}, ["it"]), f'{{"order": "a", "it": {text}}}')
    assert isinstance(found, Rejection)
    assert found.reason == "schema violation"


MOMENT = (
    r"\A(0000|0001|2026|9999|[0-9]{4})-(01|02|12)-(01|28|29|31)[Tt ]([01][0-9]|2[0-4]):[0-5][0-9]:([0-5][0-9]|60)"
    r"(\.[0-9]{1,10})?([Zz]|[+-](00:00|01:30|14:00|23:59))\Z"
)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]) | st.just("\0"), max_size=3)
OF_TYPE: dict[SqlType, st.SearchStrategy[Any]] = {
    "timestamptz": st.from_regex(MOMENT) | st.datetimes().map(lambda one: f"{one.isoformat()}Z"),
    "bigint": st.integers(-(2**63), 2**63 - 1) | st.decimals(-9, 9, places=1).filter(lambda one: one % 1 == 0),
    "numeric": st.integers() | st.decimals(allow_nan=False, allow_infinity=False),
    "boolean": st.booleans(),
    "text": TEXTS,
    "uuid": st.uuids().map(str),
    "jsonb": st.dictionaries(TEXTS, st.none() | TEXTS | st.integers(), max_size=2),
}


@pytest.mark.parametrize(
    ("type_", "value"),
    [
        ("timestamptz", "0000-12-31T23:59:59Z"),
        ("timestamptz", "0000-12-31T10:00:00-14:00"),
        ("timestamptz", "0001-01-01T00:00:00+14:00"),
        ("timestamptz", "9999-12-31T23:59:59-14:00"),
        ("timestamptz", "2016-12-31T23:59:60Z"),
        ("text", "a\0"),
        ("jsonb", {"a": "\0"}),
    ],
)
def test_what_postgres_has_nothing_for_is_found_either_way(type_: SqlType, value: object) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - whatever it says
        convert(type_, value)
    with pytest.raises(ValueError):  # noqa: PT011
        convert_all(type_, [value])


@given(st.data())
@pytest.mark.parametrize("type_", OF_TYPE)
def test_what_is_converted_all_at_once_is_as_one_by_one(type_: SqlType, data: st.DataObject) -> None:
    values = data.draw(st.lists(st.none() | OF_TYPE[type_], max_size=3))
    try:
        found = convert_all(type_, values)
    except ValueError:
        return
    assert [*found] == [convert(type_, value) for value in values]
