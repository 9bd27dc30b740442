"""A payload against its schema: valid values, the property that is wrong, and details that are safe to print."""

from __future__ import annotations

import pickle
import re
from typing import Any

import pytest

from outbox.base.errors import Failure
from outbox.base.settings import load
from outbox.events import catalog
from outbox.events.schema import DETAIL_MAX_CHARACTERS, EventSchema, shortened
from tests.support.declared import schema_of

VALUE: dict[str, Any] = {
    "movement_id": "6f1f3c6e-0f53-4d0b-9b0e-0d2c6a3a7c11",
    "item_id": "01a1fc75-167d-7239-af57-d1ee1a62e0a6",
    "quantity": -1250,
    "unit": "KGM",
    "stock_after": 0,
    "version": 1,
    "occurred_at": "2026-11-21T10:00:00.123456Z",
}


@pytest.fixture(scope="module")
def picked() -> EventSchema:
    return catalog.of_project(load(environment=False)).schema("item", "picked", 1)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"quantity": 2**63 - 1, "stock_after": -(2**63), "version": 2**63 - 1},
        {"occurred_at": "2026-11-21T10:00:00Z"},
        {"note": "a property of a later writer", "parts": [1, 2]},
    ],
)
def test_event_as_written_or_with_more_is_valid(picked: EventSchema, change: dict[str, Any]) -> None:
    picked.require_valid({**VALUE, **change})
    assert picked.are_valid([VALUE, {**VALUE, **change}])


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
def test_wrong_value_is_named(picked: EventSchema, name: str, value: object) -> None:
    with pytest.raises(Failure, match=re.escape(f"$.{name}")) as caught:
        picked.require_valid({**VALUE, name: value})
    assert caught.value.code == "event-invalid"
    assert not picked.are_valid([VALUE, {**VALUE, name: value}])


@pytest.mark.parametrize("name", VALUE)
def test_missing_property_is_named(picked: EventSchema, name: str) -> None:
    with pytest.raises(Failure, match=rf"\$\.{name}\b"):
        picked.require_valid({other: value for other, value in VALUE.items() if other != name})


@pytest.mark.parametrize("value", [None, [], "text", 1])
def test_value_that_is_no_object_is_refused(picked: EventSchema, value: object) -> None:
    for schema in (picked, schema_of({"properties": {"it": {}}})):
        assert schema.violation(value) is not None


def test_executor_gets_the_same_schema(picked: EventSchema) -> None:
    sent = pickle.loads(pickle.dumps(picked))  # noqa: S301
    assert (sent.name, sent.columns) == (picked.name, picked.columns)
    assert sent.violation({**VALUE, "unit": "eur"}) == picked.violation({**VALUE, "unit": "eur"}) is not None


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
def test_detail_has_printable_characters_only(text: str, shown: str) -> None:
    assert shortened(text) == shown


@pytest.mark.parametrize("character", ["x", "\0", "\U000e0001"])
def test_detail_is_short_whatever_its_characters(character: str) -> None:
    assert len(shortened(character * 1_000_000)) == DETAIL_MAX_CHARACTERS + 1
    assert shortened("x" * DETAIL_MAX_CHARACTERS) == "x" * DETAIL_MAX_CHARACTERS


@pytest.mark.parametrize("rule", [{"additionalProperties": False}, {"additionalProperties": {"type": "string"}}])
@pytest.mark.parametrize("name", ["a\0b", "\x1b]0;title\x07"])
def test_name_of_a_property_at_fault_is_printable(rule: dict[str, Any], name: str) -> None:
    violation = schema_of({"properties": {"m": {"type": "object", **rule}}}).violation({"m": {name: 1}})
    assert violation is not None
    assert violation.detail.isprintable()
    assert "$.m" in violation.detail
