"""A payload against its schema, on a driver and on its executors; and details that are safe to print."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from outbox.events.schema import DETAIL_MAX_CHARACTERS, EventSchema, shortened
from tests.support.declared import schema_of


@pytest.mark.parametrize("value", [None, [], "text", 1])
def test_value_that_is_no_object_is_refused(value: object) -> None:
    assert schema_of({"properties": {"it": {}}}).violation(value) is not None


def test_executor_gets_the_same_schema() -> None:
    schema = EventSchema("item", "picked", 1, {"properties": {"id": {"type": "string", "format": "uuid"}}}, "id")
    sent = pickle.loads(pickle.dumps(schema))  # noqa: S301
    assert (sent.name, sent.columns) == (schema.name, schema.columns)
    upper = {"id": "01A1FC75-167D-7239-AF57-D1EE1A62E0A6"}
    assert sent.violation(upper) == schema.violation(upper) is not None
    assert sent.violation({"id": upper["id"].lower()}) is None


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
