"""Which edits of a published event are compatible, and that those are: no payload, column or reader is lost."""

from __future__ import annotations

import copy
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from outbox.base.errors import Failure
from outbox.events.catalog import Catalog
from outbox.events.schema import EventSchema
from outbox.events.values import convert
from outbox_lab.events.compatibility import compare, compare_schemas
from outbox_lab.events.expansion import expanded
from tests.support.declared import TOML, Events, payload
from tests.support.made_schemas import DOCUMENTS, ENUM, NAMES, NUMBERS, RULES, SIZES, value

TEXT = {"type": "string"}
BIGINT = {"type": "integer", "minimum": 0, "maximum": 100}


def edit(before: dict[str, Any], after: dict[str, Any]) -> list[tuple[str, str]]:
    """The rules that an edit breaks, each with its property."""
    old, new = (EventSchema("order", "placed", 1, one) for one in (before, after))
    return sorted((finding.rule, finding.property) for finding in compare_schemas(old, new))


def of(rule: Any, defs: Any = None, *, required: bool = True, **more: Any) -> dict[str, Any]:
    return payload({"it": rule}, ("it",) if required else (), **more, **({"$defs": defs} if defs else {}))


def nested(rule: Any) -> dict[str, Any]:
    lines = {"type": "array", "items": {"type": "object", "properties": {"it": rule}, "required": ["it"]}}
    return payload({"lines": lines}, ("lines",))


ANNOTATED = {"title": "t", "description": "d", "examples": ["x"], "$comment": "c", "default": "x", "x-owner": "me"}
COMPATIBLE: list[tuple[Any, Any]] = [
    (TEXT, TEXT | ANNOTATED),
    (TEXT, {"$ref": "#/$defs/text"}),
    ({"$ref": "#/$defs/text"}, {"$ref": "#/$defs/other", "description": "d"}),
    ({"$ref": "#/$defs/text", "maxLength": 3}, {"maxLength": 4, "type": "string"}),
    ({"type": ["string", "null"]}, {"type": ["null", "string"]}),
    (BIGINT, BIGINT | {"minimum": -1, "maximum": 101}),
    ({"type": "number", "exclusiveMaximum": 9}, {"type": "number", "exclusiveMaximum": 9.5}),
    (TEXT | {"minLength": 2, "maxLength": 5}, TEXT | {"minLength": 1, "maxLength": 6}),
    (TEXT | {"pattern": "^a", "maxLength": 5}, TEXT | {"pattern": "^a", "maxLength": 6}),
    ({"enum": ["a"]}, {"enum": ["b", "a"]}),
    ({"properties": {"old": TEXT}}, {"properties": {"old": TEXT, "new": TEXT}}),
    ({"anyOf": [TEXT | {"maxLength": 2}, BIGINT]}, {"anyOf": [TEXT | {"maxLength": 3}, BIGINT]}),
    ({"type": "object", "patternProperties": {"^x": TEXT}}, {"type": "object", "patternProperties": {"^x": TEXT}}),
]
INCOMPATIBLE: list[tuple[Any, Any, str]] = [
    (TEXT, {"type": "boolean"}, "type-changed"),
    (TEXT, {"type": ["string", "null"]}, "type-changed"),
    (TEXT, {}, "type-changed"),
    ({}, TEXT, "type-changed"),
    (BIGINT, BIGINT | {"minimum": 1}, "bound-narrowed"),
    (BIGINT, BIGINT | {"exclusiveMaximum": 100}, "bound-narrowed"),
    ({"type": "array"}, {"type": "array", "maxItems": 9}, "bound-narrowed"),
    (TEXT | {"pattern": "^a"}, TEXT | {"pattern": "^[ab]"}, "keyword-changed"),
    ({"type": "number", "multipleOf": 2}, {"type": "number", "multipleOf": 1}, "keyword-changed"),
    ({"enum": ["a", "b"]}, {"enum": ["a"]}, "value-removed"),
    ({"enum": [1]}, {"enum": [True]}, "value-removed"),
    ({"enum": ["a"]}, {"enum": ["a", None]}, "type-changed"),
    (TEXT | {"enum": ["a"]}, TEXT, "keyword-changed"),
    ({"const": "a"}, {"enum": ["b", "a"]}, "keyword-changed"),
    ({"not": {"const": 0}}, {}, "keyword-changed"),
    ({"anyOf": [TEXT]}, {"anyOf": [TEXT, BIGINT]}, "keyword-changed"),
    ({"type": "array"}, {"type": "array", "items": TEXT}, "keyword-changed"),
]
CHANGED = ("keyword-changed", "")
DEFS = {"text": TEXT, "other": {"$ref": "#/$defs/text"}}


@pytest.mark.parametrize(("before", "after"), COMPATIBLE)
@pytest.mark.parametrize("place", [of, nested])
def test_compatible_edit_has_no_finding(place: Any, before: Any, after: Any) -> None:
    assert edit({**place(before), "$defs": DEFS}, {**place(after), "$defs": DEFS}) == []


@pytest.mark.parametrize(("before", "after", "rule"), INCOMPATIBLE)
@pytest.mark.parametrize(("place", "path"), [(of, "it"), (nested, "lines[].it")])
def test_incompatible_edit_names_rule_and_property(place: Any, path: str, before: Any, after: Any, rule: str) -> None:
    assert (rule, path) in edit(place(before), place(after))


def tree(rule: Any) -> dict[str, Any]:
    """A rule that refers to itself."""
    more = {"items": {"$ref": "#/$defs/node"}}
    return of({"$ref": "#/$defs/node"}, {"node": {"properties": {"name": rule, "more": more}}})


def multiplied(rule: Any) -> dict[str, Any]:
    """References that multiply."""
    below = [{"$ref": f"#/$defs/d{number + 1}"} for number in range(40)]
    every = {f"d{number}": {"properties": {"a": one, "b": one}} for number, one in enumerate(below)}
    return of({"$ref": "#/$defs/d0"}, {**every, "d40": rule})


OPTIONAL = of(TEXT, required=False)
CLOSED = ({"additionalProperties": False}, {"additionalProperties": TEXT}, {"patternProperties": {"^i": TEXT}})
NOT_ALLOWED = [("property-not-allowed", "it")]
LONGER = {"type": "integer", "minimum": 0}
ANY: dict[str, Any] = {"type": "object"}


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        (payload(), OPTIONAL, []),
        (payload(), of(TEXT), [("required-changed", "it")]),
        (payload(), payload(allOf=[{"required": ["it"]}, OPTIONAL]), [CHANGED, ("required-changed", "it")]),
        *((payload(**closed), {**OPTIONAL, **closed}, NOT_ALLOWED) for closed in CLOSED),
        (payload(required=("it",)), of(TEXT), [*NOT_ALLOWED, ("required-changed", "it")]),  # any content was valid
        (of(ANY), of(ANY | {"properties": {"new": TEXT}}), [("property-not-allowed", "it.new")]),
        (OPTIONAL, payload(), [("property-removed", "it")]),
        (of(TEXT), OPTIONAL, [("column-changed", "it"), ("required-changed", "it")]),
        (of(BIGINT), of(LONGER), [("column-changed", "it")]),
        (nested(BIGINT), nested(LONGER), []),
        (tree(TEXT | {"maxLength": 2}), tree(TEXT), [("not-comparable", "")]),
        (tree(TEXT), tree(TEXT | ANNOTATED), []),
        (multiplied(TEXT), multiplied(BIGINT), [("not-comparable", "")]),
        # They depend on everything.
        (of(TEXT | {"maxLength": 2}, unevaluatedProperties=False), of(TEXT, unevaluatedProperties=False), [CHANGED]),
    ],
)
def test_edit_of_properties_and_references(
    before: dict[str, Any], after: dict[str, Any], found: list[tuple[str, str]]
) -> None:
    assert edit(before, after) == found


class TestCatalogs:
    @pytest.fixture
    def events(self, tmp_path: Path) -> Events:
        common = {"$defs": {"text": TEXT | {"maxLength": 9}}}
        order = of({"$ref": "../common.schema.json#/$defs/text"})
        events = Events(tmp_path / "events").write("common.schema.json", common)
        events.aggregate("order", placed_v1=order, paid_v1=payload(), lost_v1=payload(deprecated=True))
        events.aggregate("gone", left_v1=payload(deprecated=True))
        return events.aggregate("item", moved_v1=order)

    @staticmethod
    def found(before: Catalog, after: Events) -> list[tuple[str, str, str]]:
        return [(one.rule, one.file, one.property) for one in compare(before, after.load())]

    def test_what_is_new_or_only_written_otherwise_is_compatible(self, tmp_path: Path, events: Events) -> None:
        assert self.found(Events(tmp_path / "none").load(), events) == []
        before = events.load()
        events.aggregate("order", placed_v2=payload(), sent_v1=payload()).aggregate("refund", paid_v1=payload())
        events.aggregate("item", f'{TOML}topic = "shop.item"\npartitions = 4\nsource = "items"\n')
        events.write("common.schema.json", {"$defs": {"text": TEXT}})
        assert self.found(before, events) == []

    def test_edit_of_a_shared_definition_counts_for_each_event(self, events: Events) -> None:
        before = events.load()
        events.write("common.schema.json", {"$defs": {"text": TEXT | {"maxLength": 8}, "more": BIGINT}})
        assert self.found(before, events) == [
            ("bound-narrowed", "item/moved.v1.schema.json", "it"),
            ("bound-narrowed", "order/placed.v1.schema.json", "it"),
        ]

    def test_version_is_removed_only_after_it_was_deprecated(self, events: Events) -> None:
        before = events.load()
        for name in ("paid", "lost"):
            (events.folder / "order" / f"{name}.v1.schema.json").unlink()
        for name in ("gone", "item"):
            shutil.rmtree(events.folder / name)
        assert self.found(before, events) == [
            ("aggregate-removed", "item/aggregate.toml", ""),
            ("version-removed", "order/paid.v1.schema.json", ""),
        ]

    def test_deprecation_is_compatible_and_its_end_is_not(self, events: Events) -> None:
        before = events.load()
        events.aggregate("order", paid_v1=payload(deprecated=True))
        assert self.found(before, events) == []
        events.aggregate("order", lost_v1=payload())
        assert self.found(before, events) == [("deprecation-withdrawn", "order/lost.v1.schema.json", "")]

    @pytest.mark.parametrize(
        ("toml", "rule"),
        [
            ('key = "it"\nversion = "number"\n', "key-changed"),
            ('key = "id"\n', "version-changed"),
            (f'{TOML}topic = "elsewhere"\n', "topic-changed"),
            (f"{TOML}partitions = 5\n", "partitions-changed"),
        ],
    )
    def test_what_orders_or_routes_the_events_stays(self, events: Events, toml: str, rule: str) -> None:
        before = events.load()
        events.aggregate("item", toml)
        assert self.found(before, events) == [(rule, "item/aggregate.toml", rule.partition("-")[0])]


# Any edit: those that are called compatible must be.

ADDED: list[dict[str, Any]] = [
    *({"maxLength": 1}, {"minLength": 1}, {"pattern": "^x"}, {"format": "uuid"}, {"format": "email"}),
    *({"minimum": 0}, {"exclusiveMaximum": 1}, {"multipleOf": 2}, {"minimum": -9, "maximum": 9}, {"type": "integer"}),
    *({"minItems": 1}, {"maxItems": 1}, {"uniqueItems": True}, {"items": {"type": "string"}}),
    *({"additionalProperties": False}, {"additionalProperties": {"type": "string"}}),
]


def places(node: Any) -> list[dict[str, Any]]:
    """Every object in a schema, keyword or map."""
    children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return ([node] if isinstance(node, dict) else []) + [found for child in children for found in places(child)]


LIMITING = {
    *("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"),
    *("minLength", "maxLength", "minItems", "maxItems"),
}
CONTENTS: list[st.SearchStrategy[Any]] = [RULES, NUMBERS, SIZES, ENUM, st.booleans()]


KINDS = ["move", "move", "remove", "put", "add", "enum", "property"]


def edited(data: st.DataObject, document: dict[str, Any]) -> dict[str, Any]:
    """The document after one edit or two."""
    made = copy.deepcopy(document)
    for _ in range(data.draw(st.integers(1, 2))):
        place = data.draw(st.sampled_from([one for one in places(made) if one]))
        with suppress(TypeError, AttributeError):  # a property may be called like a keyword
            change(data, data.draw(st.sampled_from(KINDS)), place)
        made = copy.deepcopy(made)  # parts that were drawn may be drawn again
    return made


def change(data: st.DataObject, kind: str, place: dict[str, Any]) -> None:
    """One edit in one object of a schema."""
    if kind == "move":
        for name in place.keys() & LIMITING:
            place[name] += data.draw(st.sampled_from([-1, 1]))
    elif kind == "remove":
        del place[data.draw(st.sampled_from(sorted(place)))]
    elif kind == "put":
        place[data.draw(st.sampled_from(sorted(place)))] = copy.deepcopy(data.draw(st.one_of(CONTENTS)))
    elif kind == "add":
        place.update(copy.deepcopy(data.draw(st.sampled_from(ADDED))))
    elif kind == "enum" and "enum" in place:
        place["enum"] = data.draw(st.permutations([*place["enum"], *data.draw(ENUM)]))[:3]
    elif kind == "property" and "properties" in place:
        place["properties"][data.draw(st.sampled_from([*NAMES, "d"]))] = copy.deepcopy(data.draw(RULES))


def schema(document: dict[str, Any]) -> EventSchema | None:
    """The schema of a document; None if it cannot be used."""
    try:
        return EventSchema("order", "placed", 1, document)
    except Failure:
        return None


def columns(of_version: EventSchema, value: dict[str, Any]) -> dict[str, Any]:
    """A payload as the columns of a version; the problem where there is one."""
    found: dict[str, Any] = {}
    for column in of_version.columns:
        try:
            found[column.name] = (column.type, convert(column.type, value.get(column.name)))
        except ValueError as error:
            found[column.name] = (column.type, str(error))
    return found


@given(DOCUMENTS, st.data())
@hypothesis.settings(
    max_examples=250,
    print_blob=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
def test_compatible_edit_keeps_every_payload_and_column(document: dict[str, Any], data: st.DataObject) -> None:
    before, after = schema(document), schema(edited(data, document))
    if before is None or after is None or compare_schemas(before, after):
        return
    tree = expanded(before.document)
    for _ in range(8):
        found = value(data, [tree])
        if before.violation(found) is None:
            assert after.violation(found) is None
            assert columns(before, found).items() <= columns(after, found).items()
