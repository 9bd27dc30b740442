"""Any event can be declared by its schema: types of columns, and what has no place in Postgres."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outbox.sink.records import Event, EventDecoder, Record, Rejection
from outbox.writing.contract import EventSchema
from tests.support.events import NOW_MS
from tests.support.failures import raises
from tests.support.record_corpus import ID

KEY = {"type": "string"}


def declare(folder: Path, properties: dict[str, Any], required: list[str], **uses: Any) -> EventDecoder:
    file = folder / "order.v1.schema.json"
    document = {"type": "object", "properties": {"order": KEY, **properties}, "required": ["order", *required]}
    file.write_text(json.dumps(document | {"$defs": {"code": {"type": "string", "pattern": "^[A-Z]{3}$"}}}))
    return EventDecoder(EventSchema(file), **({"key": "order"} | uses))


def decode(decoder: EventDecoder, text: str) -> Event | Rejection:
    return decoder.record(Record(b"a", [("id", ID.encode())], text.encode(), NOW_MS))


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
    decoder = declare(tmp_path, {"it": rule}, ["it"] if is_required else [])
    assert decoder.columns[1] == ("it", type_, is_nullable)


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
    assert isinstance(found, Event)
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


@pytest.mark.parametrize(
    ("properties", "uses"),
    [
        ({}, {"key": "unknown"}),
        ({"it": {"type": "string"}}, {"key": "it"}),
        ({"it": {"type": "object"}}, {"key": "it"}),
        ({"it": {"type": "integer"}}, {"version": "it"}),
        ({"it": {"type": "string"}}, {"quantity": "it"}),
        ({"offset": {"type": "integer"}}, {}),
    ],
)
def test_what_cannot_be_a_key_a_version_or_a_quantity_is_refused(
    tmp_path: Path, properties: dict[str, Any], uses: dict[str, str]
) -> None:
    with raises("event-declaration-unusable"):
        declare(tmp_path, properties, [], **uses)
