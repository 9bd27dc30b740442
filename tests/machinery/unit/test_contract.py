"""The contract of the events, and that a change of its file breaks no reader."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from outbox.base.errors import Failure
from outbox.writing.contract import DETAIL_MAX_CHARACTERS, EventSchema, shortened
from tests.support.events import SHAPE

VALUE: dict[str, Any] = {
    "movement_id": "6f1f3c6e-0f53-4d0b-9b0e-0d2c6a3a7c11",
    "item_id": "01a1fc75-167d-7239-af57-d1ee1a62e0a6",
    "quantity": -1250,
    "unit": "KGM",
    "stock_after": 0,
    "version": 1,
    "occurred_at": "2026-11-21T10:00:00.123456Z",
}
HEADERS: dict[str, str | None] = {
    "id": "01a1fc75-167d-7239-af57-d1ee1a62e0a6",
    "eventType": "item.picked",
    "schemaVersion": "1",
}


@pytest.fixture(scope="module")
def contract() -> EventSchema:
    return EventSchema(SHAPE.schema_file)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"quantity": 2**63 - 1, "stock_after": -(2**63), "version": 2**63 - 1},
        {"occurred_at": "2026-11-21T10:00:00Z"},
        {"note": "a property of a later writer", "parts": [1, 2]},
    ],
)
def test_an_event_as_the_service_writes_it_or_a_later_one_with_more_is_valid(
    contract: EventSchema, change: dict[str, Any]
) -> None:
    contract.check_value({**VALUE, **change})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("movement_id", "6f1f3c6e"),
        ("movement_id", None),
        ("item_id", VALUE["item_id"].upper()),
        ("item_id", VALUE["item_id"] + "\n"),
        ("quantity", 0),
        ("quantity", 2**63),
        ("quantity", 1.5),
        ("quantity", "1"),
        ("quantity", True),
        ("unit", "eur"),
        ("unit", "KGM\n"),
        ("stock_after", -(2**63) - 1),
        ("version", 0),
        ("occurred_at", "2026-11-21 10:00:00"),
        ("occurred_at", "2026-11-21T10:00:00+01:00"),
    ],
)
def test_a_wrong_value_is_named(contract: EventSchema, name: str, value: object) -> None:
    with pytest.raises(Failure, match=re.escape(f"$.{name}")) as caught:
        contract.check_value({**VALUE, name: value})
    assert caught.value.code == "contract-broken"


@pytest.mark.parametrize("value", [None, [], "text", 1])
def test_a_value_that_is_no_object_is_refused(contract: EventSchema, value: object) -> None:
    with pytest.raises(Failure):
        contract.check_value(value)


def test_headers_may_be_more_and_the_trace_may_be_absent_or_null(contract: EventSchema) -> None:
    contract.check_headers(HEADERS)
    contract.check_headers({**HEADERS, "traceparent": None, "more": "x"})


@pytest.mark.parametrize(("name", "value"), [("id", "1"), ("eventType", "item.made"), ("schemaVersion", "2")])
def test_a_wrong_header_is_named(contract: EventSchema, name: str, value: str) -> None:
    with pytest.raises(Failure, match=re.escape(f"header {name}")):
        contract.check_headers({**HEADERS, name: value})


def test_headers_may_refer_to_a_definition(tmp_path: Path) -> None:
    file = tmp_path / "event.json"
    definitions = {"digit": {"pattern": "^[0-9]$"}, "headers": {"properties": {"id": {"$ref": "#/$defs/digit"}}}}
    file.write_text(json.dumps({"properties": {}, "$defs": definitions}))
    contract = EventSchema(file)
    contract.check_headers({"id": "1"})
    with pytest.raises(Failure, match="header id"):
        contract.check_headers({"id": "one"})


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\0b", r"a\x00b"),
        ("\x1b[2J\r\n\t", r"\x1b[2J\r\n\t"),
        ("\x7f\x9b", r"\x7f\x9b"),
        ("\u202e\u2028", r"\u202e\u2028"),
        ("half \ud800", r"half \ud800"),
        ("ü \U0001f600 \\ n", "ü \U0001f600 \\ n"),
    ],
)
def test_a_detail_has_printable_characters_only(text: str, shown: str) -> None:
    assert shortened(text) == shown


@pytest.mark.parametrize("character", ["x", "\0", "\U000e0001"])
def test_a_detail_is_short_whatever_its_characters(character: str) -> None:
    assert len(shortened(character * 1_000_000)) == DETAIL_MAX_CHARACTERS + 1
    assert shortened("x" * DETAIL_MAX_CHARACTERS) == "x" * DETAIL_MAX_CHARACTERS


@pytest.mark.parametrize("rule", [{"additionalProperties": False}, {"additionalProperties": {"type": "string"}}])
@pytest.mark.parametrize("name", ["a\0b", "\x1b]0;title\x07"])
def test_the_name_of_a_property_at_fault_is_printable(tmp_path: Path, rule: dict[str, Any], name: str) -> None:
    file = tmp_path / "event.json"
    file.write_text(json.dumps({"properties": {"m": {"type": "object", **rule}}}))
    violation = EventSchema(file).value_violation({"m": {name: 1}})
    assert violation is not None
    assert violation.detail.isprintable()
    assert "$.m" in violation.detail
