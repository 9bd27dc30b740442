"""Histories that contract tests make from schemas."""

from __future__ import annotations

from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outbox.base.errors import Failure
from outbox.base.settings import load
from outbox.events import catalog
from outbox.sink import discovery
from outbox.sink.decoding.decoder import DecodedEvent
from outbox_lab.testing.contract.events import History, Lifecycle, histories, values

SETTINGS = load(environment=False)
ORDERS = discovery.chosen(SETTINGS, "activity")
HISTORIES = histories(SETTINGS, ORDERS, Lifecycle())
RULES: list[dict[str, Any]] = [
    {"type": "integer", "minimum": 3, "exclusiveMaximum": 5},
    {"type": "integer", "multipleOf": 7, "not": {"const": 0}},
    {"type": "integer", "minimum": 2**40},
    {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    {"type": "string", "pattern": "^[A-Z]{3}$", "maxLength": 3},
    {"type": "string", "minLength": 30},
    {"type": "string", "format": "date-time", "pattern": "Z$"},
    {"type": ["string", "null"], "format": "uuid"},
    {"enum": ["a", None, 3]},
    {"const": {"a": 1}},
    {"anyOf": [{"type": "integer"}, {"type": "string", "format": "date"}]},
    {"allOf": [{"type": "integer", "minimum": 2}, {"maximum": 9}], "minimum": 1},
    {"type": "array", "items": {"type": "integer"}, "minItems": 5, "uniqueItems": True},
    {"type": "array", "prefixItems": [{"type": "string"}], "items": {"type": "integer"}, "minItems": 2},
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["b"]},
    {"type": "object", "properties": {"a": {"const": 1}}, "if": {"required": ["a"]}, "then": {"maxProperties": 1}},
    {},
]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_every_value_is_valid(rule: dict[str, Any]) -> None:
    validator = jsonschema_rs.Draft202012Validator(rule, validate_formats=True)

    @settings(max_examples=20, database=None)
    @given(values(rule))
    def check(value: Any) -> None:
        assert validator.is_valid(value)

    check()


def test_examples_serve_where_no_value_can_be_made() -> None:
    rule = {"type": "string", "pattern": "(?!)|^x$", "maxLength": 0, "minLength": 0}
    with pytest.raises(Failure) as failure:
        values(rule)
    assert failure.value.code == "contract-no-values"
    strange = {"type": "object", "patternProperties": {"^x": {"type": "integer"}}, "minProperties": 1}
    found = values(strange, [{"x1": 1}, {"x1": "no"}])

    @settings(max_examples=5, database=None)
    @given(found)
    def check(value: Any) -> None:
        assert value == {"x1": 1}

    check()


@settings(max_examples=30, database=None)
@given(HISTORIES)
def test_a_sink_takes_every_event(history: History) -> None:
    for one in history.sent:
        assert isinstance(ORDERS.decoders[one.topic].record(one.record), DecodedEvent), one


@settings(max_examples=30, database=None)
@given(histories(SETTINGS, ORDERS, Lifecycle(begins=frozenset({"order.placed"}), once=frozenset({"order.placed"}))))
def test_a_history_keeps_to_its_lifecycle(history: History) -> None:
    versions = {name: one.version for name, one in catalog.of_project(SETTINGS).aggregates.items()}
    of_keys: dict[tuple[str, str], list[str]] = {}
    for one in history.sent:
        names = of_keys.setdefault((one.topic, one.key), [])
        names.append(one.schema.event)
        assert one.payload[str(versions[one.schema.aggregate])] == len(names)
    for (topic, _), names in of_keys.items():
        if topic.endswith("order"):
            assert names.index("order.placed") == 0
            assert names.count("order.placed") == 1


def test_histories_have_every_event_and_version() -> None:
    seen = set[str]()

    @settings(max_examples=60, database=None, derandomize=True)
    @given(st.data())
    def look(data: st.DataObject) -> None:
        seen.update(one.schema.name for one in data.draw(HISTORIES).sent)

    look()
    known = catalog.of_project(SETTINGS)
    assert seen == {
        schema.name for schema in known.schemas if known.aggregates[schema.aggregate].topic in ORDERS.topics
    }
    assert "order.placed.v2" in seen
